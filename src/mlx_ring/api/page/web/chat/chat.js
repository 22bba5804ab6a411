// The chat: conversations of this browser, the one that is open, and the composer.

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { kept, Notice, onceClicked, Ring } from "../parts.js";
import { Composer } from "./composer.js";
import { isAnswer, openCalls } from "./conversation.js";
import { Answer, ToolResult, UserMessage } from "./message.js";
import { keepParameters, problemOf, readParameters } from "./parameters.js";

const MODEL = "mlx-ring.model";
const NEAR_PX = 60;
const EXAMPLES = {
  demo: ["What is the capital of France?", "What is 2 plus 3?", "What is the opposite of hot?"],
  other: ["What can you help me with?", "Explain in three sentences how you work.", "Write a haiku about the sea."],
};

export function Chat({ chats, models, standing }) {
  const [now, setNow] = useState(chats.now);
  const [parameters, setParameters] = useState(readParameters);
  const [chosen, setChosen] = useState(() => kept.read(MODEL));
  const [isOpen, setOpen] = useState(false);
  useEffect(() => chats.subscribe(setNow), [chats]);

  const model = models.some(({ id }) => id === chosen) ? chosen : (models[0]?.id ?? null);
  const options = { model, parameters: fitting(parameters, models.find(({ id }) => id === model)) };
  const isRunning = now.running.has(now.open.id);
  const problem = problemOf(parameters);
  /** With parameters that cannot be sent nothing is asked, and they are shown instead. Tells whether it was asked. */
  const asking = (act) => (...given) => {
    if (problem) setOpen(true);
    else act(...given, options);
    return !problem;
  };
  const ask = asking((text, how) => chats.ask(text, how));

  return html`<div class="chat">
    <${Conversations} now=${now} chats=${chats} />
    <div class="talk">
      <${Thread}
        conversation=${now.open}
        isRunning=${isRunning}
        several=${models.length > 1}
        edit=${asking((place, text, how) => chats.edit(place, text, how))}
        retry=${asking((how) => chats.retry(how))}
        giveResult=${asking((call, text, how) => chats.giveResult(call, text, how))}
        empty=${html`<${Welcome} model=${model} standing=${standing} ask=${ask} />`}
      />
      ${standing.notices
        .filter(({ tone }) => tone !== "note")
        .map(({ tone, text }) => html`<${Notice} key=${text} tone=${tone}>${text}</${Notice}>`)}
      ${!now.isKept && html`<${Notice} tone="note">This browser has no room to keep this conversation: it is gone when the page is closed.</${Notice}>`}
      <${Composer}
        ask=${ask}
        stop=${() => chats.stop()}
        isRunning=${isRunning}
        models=${models}
        model=${model}
        setModel=${(id) => {
          kept.write(MODEL, id);
          setChosen(id);
        }}
        parameters=${parameters}
        setParameters=${(changed) => {
          keepParameters(changed);
          setParameters(changed);
        }}
        problem=${problem}
        isOpen=${isOpen}
        setOpen=${setOpen}
        draft=${chats.draft}
        keepDraft=${(text) => {
          chats.draft = text;
        }}
        focusOn=${now.open.id}
      />
    </div>
  </div>`;
}

/** What the model can make use of: another may have been asked before. */
function fitting(parameters, model) {
  const { efforts = [], hasTools = true } = model ?? {};
  const effort = efforts.includes(parameters.effort) ? parameters.effort : "";
  return { ...parameters, effort, tools: hasTools ? parameters.tools : "" };
}

function Conversations({ now, chats }) {
  const [isOpen, setOpen] = useState(false);
  const [isSure, setSure] = useState(false);
  const chosen = (act) => () => {
    act();
    setOpen(false);
    setSure(false);
  };
  const any = now.conversations.length > 0;
  return html`<aside class=${`conversations${isOpen ? " open" : ""}`} aria-label="Conversations">
    <div class="row">
      <button type="button" onClick=${chosen(() => chats.begin())}>New chat</button>
      <button type="button" class="quiet narrow-only" aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>
        ${any ? `History (${now.conversations.length})` : "History"}
      </button>
    </div>
    <div class="history">
      <ul>
        ${now.conversations.map(
          (conversation) => html`<li key=${conversation.id} class=${conversation.id === now.open.id ? "current" : ""}>
            <button
              type="button"
              class="title"
              aria-current=${conversation.id === now.open.id ? "true" : null}
              onClick=${chosen(() => chats.show(conversation.id))}
            >${now.running.has(conversation.id) ? html`<i class="dot busy" aria-label="being answered"></i>` : null}${conversation.title || "Without words"}</button>
            <button type="button" class="quiet" aria-label=${`Delete ${conversation.title}`} title="Delete" onClick=${onceClicked(() => chats.remove(conversation.id))}>×</button>
          </li>`,
        )}
      </ul>
      <p class="muted">${any ? "Kept in this browser only; the server keeps no chat." : "Chats are kept in this browser only; the server keeps none."}</p>
      ${any &&
      html`<p>
        ${isSure
          ? html`<button type="button" class="danger" onClick=${onceClicked(chosen(() => chats.clear()))}>Delete them for good</button>
              <button type="button" class="quiet" onClick=${() => setSure(false)}>Keep</button>`
          : html`<button type="button" class="quiet" onClick=${() => setSure(true)}>Delete all</button>`}
      </p>`}
    </div>
  </aside>`;
}

/** Follows what is written for as long as its end is in sight. */
function Thread({ conversation, isRunning, several, edit, retry, giveResult, empty }) {
  const scroll = useRef(null);
  const follows = useRef(true);
  const [isBehind, setBehind] = useState(false);
  const toEnd = () => {
    scroll.current.scrollTop = scroll.current.scrollHeight;
  };
  useLayoutEffect(() => {
    follows.current = true;
    toEnd();
  }, [conversation.id, conversation.messages.length]);
  useLayoutEffect(() => {
    if (follows.current) toEnd();
  }, [conversation]);
  useEffect(() => {
    // The composer grows, or a phone's keyboard comes up: what was in sight stays so.
    const resized = new ResizeObserver(() => follows.current && toEnd());
    resized.observe(scroll.current);
    return () => resized.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = scroll.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    setBehind(!follows.current);
  };
  const messages = conversation.messages;
  const open = openCalls(conversation);
  return html`<div class="thread" ref=${scroll} onScroll=${onScroll}>
    <div class="messages">
      ${messages.length ? null : empty}
      ${messages.map((message, place) => {
        const isLast = place === messages.length - 1;
        const key = `${conversation.id}/${place}`;
        if (message.role === "user") {
          return html`<${UserMessage} key=${key} message=${message} isRunning=${isRunning} edit=${(text) => edit(place, text)} />`;
        }
        if (!isAnswer(message)) return html`<${ToolResult} key=${key} message=${message} />`;
        return html`<${Answer}
          key=${key}
          message=${message}
          isRunning=${isRunning && isLast}
          several=${several}
          retry=${isLast && !isRunning ? () => retry() : null}
          openCalls=${open}
          giveResult=${giveResult}
        />`;
      })}
    </div>
    ${isBehind && html`<button type="button" class="to-end" onClick=${toEnd}>To the end</button>`}
    <p class="unseen" role="status">${isRunning ? "The answer is being written." : endOf(messages.at(-1))}</p>
  </div>`;
}

/** For those who hear the page; what went wrong is told where it stands. */
function endOf(message) {
  if (!message || !isAnswer(message) || message.problem) return "";
  return { stopped: "The answer was stopped.", unknown: "" }[message.end] ?? "The answer is complete.";
}

function Welcome({ model, standing, ask }) {
  const examples = (model ?? "").startsWith("demo") ? EXAMPLES.demo : EXAMPLES.other;
  return html`<div class="welcome">
    <${Ring} size=${72} />
    <h1>${model ? html`Ask <b>${model}</b>` : "Ask something"}</h1>
    <p class="muted">${standing.where}</p>
    <ul>
      ${examples.map((example) => html`<li key=${example}><button type="button" onClick=${() => ask(example)}>${example}</button></li>`)}
    </ul>
  </div>`;
}
