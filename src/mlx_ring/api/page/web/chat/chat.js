// The chat view: list of conversations, thread, composer.

/** @import { RequestStatus } from "../types.js" */
/** @import { ChatModel } from "../models.js" */
/** @import { Status } from "../status.js" */
/** @import { Parameters } from "./parameters.js" */
/** @import { ChatStore } from "./store.js" */

import { Notice } from "../components.js";
import { counted } from "../format.js";
import { readStored, writeStored } from "../storage.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Composer } from "./composer.js";
import { isAnswer } from "./conversation.js";
import { History } from "./history.js";
import { findProblem, readParameters, storeParameters } from "./parameters.js";
import { ContextGauge, contextTokens, requestOf } from "./progress.js";
import { Thread } from "./thread.js";
import { TitleBar } from "./title-bar.js";
import { Welcome } from "./welcome.js";

const STORED_MODEL = "mlx-ring.model";

/**
 * Render the chat view.
 * @param {{ chats: ChatStore, models: ChatModel[], status: Status, requests: RequestStatus[] }} props
 */
export function Chat({ chats, models, status, requests }) {
  const [now, setNow] = useState(chats.now);
  const [parameters, setParameters] = useState(readParameters);
  const [chosen, setChosen] = useState(() => readStored(STORED_MODEL));
  const [isPanelOpen, setPanelOpen] = useState(false);
  useEffect(() => chats.subscribe(setNow), [chats]);

  const model = models.find(({ id }) => id === chosen) ?? models[0];
  const options = { model: model?.id ?? null, parameters: supportedParameters(parameters, model) };
  const problem = findProblem(parameters);
  /** Send nothing while the parameters have a problem, but show them. Return true if it was sent. */
  const send = (/** @type {() => void} */ act) => {
    if (problem) setPanelOpen(true);
    else act();
    return !problem;
  };
  const ask = (/** @type {string} */ text) => send(() => chats.ask(text, options));
  const isRunning = now.running.has(now.open.id);
  const last = now.open.messages.at(-1);
  const request = isRunning && last && isAnswer(last) ? requestOf(requests, last.id) : undefined;

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
        showsModel=${models.length > 1}
        edit=${(/** @type {number} */ place, /** @type {string} */ text) =>
          send(() => chats.edit(place, text, options))}
        retry=${() => send(() => chats.retry(options))}
        addResult=${(/** @type {any} */ call, /** @type {string} */ text) =>
          send(() => chats.addResult(call, text, options))}
        empty=${html`<${Welcome} model=${options.model} placement=${status.placement} ask=${ask} />`}
      />
      ${status.notices
        .filter(({ tone }) => tone !== "note")
        .map(({ tone, text }) => html`<${Notice} key=${text} tone=${tone}>${text}</${Notice}>`)}
      ${
        !now.isStored &&
        html`<${Notice} tone="note">
        The browser has no room to store this conversation. It is lost when you close the page.
      </${Notice}>`
      }
      ${
        now.unstored > 0 &&
        html`<${Notice} tone="note">
        The browser has no room for ${counted(now.unstored, "older chat")}: export what you want to keep, and delete
        others. What is not stored is lost when you close the page.
      </${Notice}>`
      }
      <${Composer}
        ask=${ask}
        stop=${() => chats.stop()}
        isRunning=${isRunning}
        models=${models}
        model=${model}
        setModel=${(/** @type {string} */ id) => {
          writeStored(STORED_MODEL, id);
          setChosen(id);
        }}
        parameters=${parameters}
        setParameters=${(/** @type {Parameters} */ changed) => {
          storeParameters(changed);
          setParameters(changed);
        }}
        problem=${problem}
        isPanelOpen=${isPanelOpen}
        setPanelOpen=${setPanelOpen}
        draft=${chats.draft}
        setDraft=${(/** @type {string} */ text) => {
          chats.draft = text;
        }}
        focusKey=${now.open.id}
        gauge=${html`<${ContextGauge} used=${contextTokens(now.open, request)} limit=${model?.contextTokens} />`}
      />
    </div>
  </div>`;
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
