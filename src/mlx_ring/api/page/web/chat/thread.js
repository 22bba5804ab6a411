// The messages of a conversation.

/** @typedef {import("preact").ComponentChildren} Children */
/** @import { ToolCall } from "./completion.js" */
/** @import { RequestStatus } from "../types.js" */
/** @import { Conversation, Message } from "./conversation.js" */

import { html, useEffect, useLayoutEffect, useRef, useState } from "../vendor/preact.js";
import { editName, isAnswer, isCutOff, openCalls } from "./conversation.js";
import { Answer, ToolResult, UserMessage } from "./message.js";

/** Distance from the end at which the thread still follows new text. */
const NEAR_END_PX = 60;

/**
 * @typedef {object} ThreadProps
 * @property {Conversation} conversation
 * @property {boolean} isRunning
 * @property {RequestStatus | undefined} request the server's, of the answer that streams
 * @property {string} refusal why nothing can be sent now; empty if it can
 * @property {string} refusalOfVersions why no other version of an answer can be shown now; empty if one can
 * @property {Map<string, string>} edits questions that are being changed, by conversation and place
 * @property {(place: number, text: string) => boolean} edit
 * @property {(place: number, text: string) => boolean} editApart asks the changed question in a copy
 * @property {(count: number) => void} branch copies the first messages into a new conversation
 * @property {(place: number) => void} retry requests the answer at this place again
 * @property {(place: number, number: number) => void} showVersion shows another version of the answer at a place
 * @property {() => void} proceed continues the last answer
 * @property {(call: ToolCall, text: string) => void} addResult
 * @property {Children} empty shown without messages
 */

/**
 * Render the messages. The thread follows new text while its end is visible.
 * @param {ThreadProps} props
 */
export function Thread(props) {
  const { conversation, isRunning, request, refusal, edits, edit, editApart, branch } = props;
  const { retry, showVersion, refusalOfVersions, proceed, addResult, empty } = props;
  const { scroller, isBehind, scrollToEnd, onScroll } = useFollowing(conversation);
  const { messages } = conversation;
  const calls = openCalls(conversation);
  return html`<div class="thread" ref=${scroller} onScroll=${onScroll}>
    <div class="messages">
      ${messages.length ? null : empty}
      ${messages.map((message, place) => {
        const isLast = place === messages.length - 1;
        const key = editName(conversation, place);
        if (isAnswer(message)) {
          // The place of the answer that streams: a retry leaves the messages after it.
          const streams = isRunning && message.end === null;
          const mayRetry = !isRunning && (isLast || (isCutOff(message) && !message.calls.length));
          return html`<${Answer}
            key=${key}
            message=${message}
            isRunning=${streams}
            request=${streams ? request : undefined}
            refusal=${refusal}
            retry=${mayRetry ? () => retry(place) : null}
            isLast=${isLast}
            showVersion=${isRunning ? null : (/** @type {number} */ number) => showVersion(place, number)}
            refusalOfVersions=${refusalOfVersions}
            branch=${streams ? null : () => branch(place + 1)}
            proceed=${isLast && !isRunning ? proceed : null}
            openCalls=${calls}
            addResult=${addResult}
          />`;
        }
        if (message.role !== "user") return html`<${ToolResult} key=${key} message=${message} />`;
        return html`<${UserMessage}
          key=${key}
          message=${message}
          isRunning=${isRunning}
          draft=${edits.get(key) ?? null}
          setDraft=${(/** @type {string | null} */ text) => {
            if (text === null) edits.delete(key);
            else edits.set(key, text);
          }}
          edit=${(/** @type {string} */ text) => edit(place, text)}
          editApart=${isLastAsked(messages, place) ? null : (/** @type {string} */ text) => editApart(place, text)}
        />`;
      })}
    </div>
    <p class="visually-hidden" role="status">${isRunning ? "The answer is streaming." : endText(messages.at(-1))}</p>
  </div>
  ${isBehind && html`<p class="to-end"><button type="button" onClick=${scrollToEnd}>Scroll to end</button></p>`}`;
}

/**
 * Return true if no question follows the one at a place: a change of it replaces nothing but its answer.
 * @param {Message[]} messages
 * @param {number} place
 */
function isLastAsked(messages, place) {
  return messages.findLastIndex(({ role }) => role === "user") === place;
}

/**
 * Keep the end in view while the conversation grows, unless the person scrolled up.
 * @param {Conversation} conversation
 */
function useFollowing(conversation) {
  const scroller = useRef(/** @type {HTMLElement | null} */ (null));
  const follows = useRef(true);
  const [isBehind, setBehind] = useState(false);
  const scrollToEnd = () => {
    if (scroller.current) scroller.current.scrollTop = scroller.current.scrollHeight;
  };
  useLayoutEffect(() => {
    follows.current = true;
    scrollToEnd();
  }, [conversation.id, conversation.messages.length]);
  useLayoutEffect(() => {
    if (follows.current) scrollToEnd();
  }, [conversation]);
  useEffect(() => {
    if (!scroller.current) return undefined;
    // The composer grows, or a phone shows its keyboard: the end stays in view.
    const resized = new ResizeObserver(() => follows.current && scrollToEnd());
    resized.observe(scroller.current);
    return () => resized.disconnect();
  }, []);
  const onScroll = () => {
    if (!scroller.current) return;
    const { scrollTop, scrollHeight, clientHeight } = scroller.current;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    setBehind(!follows.current);
  };
  return { scroller, isBehind, scrollToEnd, onScroll };
}

/**
 * Return what a screen reader announces at the end. Problems are alerts of their own.
 * @param {Message | undefined} message
 */
function endText(message) {
  if (!message || !isAnswer(message) || message.problem || message.failed || message.end === "unknown") return "";
  if (message.end === "unreached") return "The server could not be reached.";
  if (message.end === "cut") return "The answer was cut off.";
  return message.end === "stopped" ? "The answer was stopped." : "The answer is complete.";
}
