// The chat view: list of conversations, thread, composer.

/** @typedef {import("preact").ComponentChildren} Children */
/** @import { ModelJobs } from "../catalog/model-jobs.js" */
/** @import { Snapshot } from "../live.js" */
/** @import { ChatModel } from "../models.js" */
/** @import { Status } from "../status.js" */
/** @import { Parameters } from "./parameters.js" */
/** @import { ChatStore } from "./store.js" */

import { describeMissing } from "../address.js";
import { Notice } from "../components.js";
import { counted } from "../format.js";
import { answers } from "../live.js";
import { useDiskNames } from "../models.js";
import { describePlacement } from "../status.js";
import { html, useEffect, useLayoutEffect, useState } from "../vendor/preact.js";
import { Composer } from "./composer.js";
import { isAnswer } from "./conversation.js";
import { History } from "./history.js";
import { findModel, isMissing, ModelNotice, readModel, storeModel, wantedModel } from "./model-choice.js";
import { findProblem, readParameters, storeParameters } from "./parameters.js";
import { ContextGauge, contextTokens, requestOf } from "./progress.js";
import { MAX_CONVERSATIONS } from "./store.js";
import { Thread } from "./thread.js";
import { TitleBar } from "./title-bar.js";
import { Welcome } from "./welcome.js";

const ANSWERS_ELSEWHERE = "Another tab of this browser receives an answer in this chat.";

/**
 * Render the chat view.
 * @param {{
 *   chats: ChatStore, live: Snapshot, models: ChatModel[], status: Status, jobs: ModelJobs, notices: Children
 * }} props `notices`: those of the cluster that a chat needs
 */
export function Chat({ chats, live, models, jobs, notices }) {
  const [now, setNow] = useState(chats.now);
  const [parameters, setParameters] = useState(readParameters);
  const [stored, setStored] = useState(readModel);
  const [running, setRunning] = useState(jobs.now);
  const [isPanelOpen, setPanelOpen] = useState(false);
  const [, setPicks] = useState(0);
  useEffect(() => chats.subscribe(setNow), [chats]);
  useEffect(() => jobs.subscribe(setRunning), [jobs]);

  const isOffline = live.connection === "lost";
  const onDisk = useDiskNames(answers(live.connection), models.map(({ id }) => id).join("\n"));
  const wanted = wantedModel(now.open, chats.picks, stored, models);
  const model = findModel(models, wanted);
  const options = { model: model?.id ?? wanted, parameters: supportedParameters(parameters, model) };
  const setModel = (/** @type {string} */ id) => {
    storeModel(id);
    chats.picks.set(now.open.id, id);
    // A new value renders the choice again, also if the stored one is the same.
    setStored(id);
    setPicks((count) => count + 1);
  };
  // Other versions can be read without the server.
  const refusalOfVersions = now.elsewhere.has(now.open.id) ? ANSWERS_ELSEWHERE : "";
  const refusal = isOffline
    ? "The server does not answer."
    : isMissing(models, wanted)
      ? `${wanted} is not loaded.`
      : refusalOfVersions;
  const problem = findProblem(parameters);
  /** Send nothing that would be refused, and show parameters that have a problem. Return true if it was sent. */
  const send = (/** @type {() => boolean} */ act) => {
    if (problem) setPanelOpen(true);
    return !problem && !refusal && act();
  };
  const ask = (/** @type {string} */ text) =>
    send(() => {
      // A person who asks has read the notice of the load.
      if (wanted !== null && running[wanted]?.served) jobs.dismiss(wanted);
      return chats.ask(text, options);
    });
  useQuestionFocus();
  const isRunning = now.running.has(now.open.id);
  const requests = live.connection === "open" ? (live.state?.requests ?? []) : [];
  const streaming = isRunning ? now.open.messages.find((each) => isAnswer(each) && each.end === null) : undefined;
  const request = streaming && isAnswer(streaming) ? requestOf(requests, streaming.id) : undefined;
  const placement =
    live.state && live.connection === "open" ? describePlacement(live.state.cluster, options.model) : "";

  return html`<div class="chat">
    <${History} now=${now} chats=${chats} />
    <div class="conversation">
      <${TitleBar}
        key=${now.open.id}
        conversation=${now.open}
        rename=${(/** @type {string} */ name) => chats.rename(name)}
      />
      <${Thread}
        conversation=${now.open}
        isRunning=${isRunning}
        request=${request}
        refusal=${refusal}
        refusalOfVersions=${refusalOfVersions}
        edits=${chats.edits}
        edit=${(/** @type {number} */ place, /** @type {string} */ text) =>
          send(() => chats.edit(place, text, options))}
        retry=${(/** @type {number} */ place) => send(() => chats.retry(place, options))}
        showVersion=${(/** @type {number} */ place, /** @type {number} */ number) => chats.showVersion(place, number)}
        branch=${(/** @type {number} */ count) => chats.branch(count)}
        editApart=${(/** @type {number} */ place, /** @type {string} */ text) =>
          send(() => {
            chats.branch(place);
            return chats.ask(text, options);
          })}
        proceed=${() => send(() => chats.continue(options))}
        addResult=${(/** @type {any} */ call, /** @type {string} */ text) =>
          send(() => chats.addResult(call, text, options))}
        empty=${html`<${Welcome} model=${options.model} placement=${placement} ask=${ask} refusal=${refusal} />`}
      />
      ${notices}
      ${
        !isOffline &&
        html`<${ModelNotice}
          models=${models}
          wanted=${wanted}
          job=${wanted === null ? undefined : running[wanted]}
          jobs=${jobs}
          setModel=${setModel}
        />`
      }
      ${now.missing !== null && html`<${Notice} tone="bad">${describeMissing(now.missing)}</${Notice}>`}
      ${
        !now.isStored &&
        html`<${Notice} tone="note">
        The browser has no room to store this conversation. It is lost when you close the page.
      </${Notice}>`
      }
      ${
        now.unstored > 0 &&
        html`<${Notice} tone="note">
        ${counted(now.unstored, "older chat")} cannot be stored: the browser has no room, or ${MAX_CONVERSATIONS} are
        stored already. Export what you want to keep, and delete others. What is not stored is lost when you close the
        page.
      </${Notice}>`
      }
      ${
        !chats.drafts.isStored(now.open) &&
        html`<${Notice} tone="note">
        The browser has no room to store this draft. It is lost when you close or reload the page.
      </${Notice}>`
      }
      <${Composer}
        ask=${ask}
        stop=${() => chats.stop()}
        isRunning=${isRunning}
        models=${isOffline ? models.map((each) => ({ ...each, note: "" })) : models}
        model=${model}
        onDisk=${onDisk}
        wanted=${wanted}
        setModel=${setModel}
        refusal=${refusal}
        parameters=${parameters}
        setParameters=${(/** @type {Parameters} */ changed) => {
          storeParameters(changed);
          setParameters(changed);
        }}
        problem=${problem}
        isPanelOpen=${isPanelOpen}
        setPanelOpen=${setPanelOpen}
        draft=${chats.drafts.get(now.open)}
        setDraft=${(/** @type {string} */ text) => chats.drafts.set(now.open, text)}
        focusKey=${now.open.id}
        gauge=${html`<${ContextGauge} used=${contextTokens(now.open, request)} limit=${model?.contextTokens} />`}
      />
    </div>
  </div>`;
}

/**
 * Move the focus to the field for a question when its element is removed or disabled, as Stop and Retry are. On a phone
 * the keyboard would cover the conversation.
 */
function useQuestionFocus() {
  // Read before the elements change.
  const { activeElement: focused, body } = document;
  useLayoutEffect(() => {
    const isLost = focused && focused !== body && (!focused.isConnected || focused.matches(":disabled"));
    const isTaken = document.activeElement !== body && document.activeElement !== focused;
    if (!isLost || isTaken || matchMedia("(pointer: coarse)").matches) return;
    document.getElementById("question")?.focus({ preventScroll: true });
  });
}

/**
 * Leave out what the model does not support, because another model may have been chosen before.
 * @param {Parameters} parameters
 * @param {ChatModel | undefined} model
 * @returns {Parameters}
 */
function supportedParameters(parameters, model) {
  const effort = model?.efforts.includes(parameters.effort) ? parameters.effort : "";
  return { ...parameters, effort, tools: (model?.hasTools ?? true) ? parameters.tools : "" };
}
