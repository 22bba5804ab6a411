// The card that invites another machine: the command to run there, to copy or to scan.

/** @import { JoinCommands } from "../types.js" */

import { ApiError, request } from "../api.js";
import { CopyButton, Notice, onSingleClick } from "../components.js";
import { duration } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/** Light modules around a QR code, which readers need. */
const MARGIN = 4;

/**
 * Render the card. It asks for a token only when the button is pressed.
 * @param {{ refusal: string | null }} props
 */
export function AddMachine({ refusal }) {
  const [invitation, setInvitation] = useState(/** @type {JoinCommands | null} */ (null));
  const [problem, setProblem] = useState("");
  const [isBusy, setBusy] = useState(false);
  const invite = async () => {
    setBusy(true);
    setProblem("");
    try {
      setInvitation(await (await request("cluster/invite", { body: {} })).json());
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      setProblem(error.message);
    } finally {
      setBusy(false);
    }
  };
  return html`<section class="panel add-machine" aria-label="Add a machine">
    <header><h2>Add a machine</h2></header>
    ${
      refusal
        ? html`<p class="muted">${withCommands(refusal)}</p>`
        : html`<p class="muted">Install the same version of mlx-ring there, then run a command that this page makes.</p>
            <p>
              <button type="button" disabled=${isBusy} onClick=${onSingleClick(invite)}>
                ${invitation ? "Make another command" : "Make a join command"}
              </button>
            </p>`
    }
    ${problem && html`<${Notice} tone="bad">${problem}</${Notice}>`}
    ${invitation && html`<${Commands} invitation=${invitation} />`}
  </section>`;
}

/**
 * Return a sentence of the server with its commands, which are between backticks, as code.
 * @param {string} sentence
 */
function withCommands(sentence) {
  return sentence.split("`").map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));
}

/** @param {{ invitation: JoinCommands }} props */
function Commands({ invitation: { commands, expires_in_s: lifeS } }) {
  const [chosen, setChosen] = useState(0);
  const command = commands[chosen] ?? commands[0] ?? "";
  return html`<div class="invitation">
    <${QrPicture} text=${command} />
    <div class="grow">
      <p>Run this on the other machine. It works once, for ${duration(lifeS)}. Keep it secret until then.</p>
      ${commands.map(
        (each, place) => html`<div key=${each} class="row command">
          ${
            commands.length > 1 &&
            html`<input
              type="radio"
              name="command"
              aria-label=${`Show the code of command ${place + 1}`}
              checked=${place === chosen}
              onChange=${() => setChosen(place)}
            />`
          }
          <code class="grow">${each}</code>
          <${CopyButton} text=${() => each} what=${`command ${place + 1}`} />
        </div>`,
      )}
      ${commands.length > 1 && html`<p class="muted">Use one whose address the other machine can reach.</p>`}
    </div>
  </div>`;
}

/** @param {{ text: string }} props */
function QrPicture({ text }) {
  const [squares, setSquares] = useState(/** @type {boolean[][]} */ ([]));
  useEffect(() => {
    let isCurrent = true;
    makeSquares(text).then(
      (made) => isCurrent && setSquares(made),
      () => {}, // The server has stopped: the command can still be copied.
    );
    return () => {
      isCurrent = false;
    };
  }, [text]);
  if (!squares.length) return null;
  const size = squares.length + 2 * MARGIN;
  return html`<svg class="qr" viewBox="0 0 ${size} ${size}" role="img" aria-label="QR code of the command">
    <rect width=${size} height=${size} fill="#fff" />
    <path fill="#000" d=${squaresPath(squares)} />
  </svg>`;
}

/**
 * Return the dark squares of the QR code of a text, by row and column.
 * @param {string} text
 */
export async function makeSquares(text) {
  const { qrcode } = await import("../vendor/qrcode.js");
  const code = qrcode(0, "M");
  code.addData(text);
  code.make();
  const places = Array.from({ length: code.getModuleCount() }, (_, place) => place);
  return places.map((row) => places.map((column) => code.isDark(row, column)));
}

/**
 * Return a path of squares of size 1, within the margin.
 * @param {boolean[][]} squares
 */
export function squaresPath(squares) {
  return squares
    .flatMap((row, y) => row.map((isDark, x) => (isDark ? `M${x + MARGIN} ${y + MARGIN}h1v1h-1z` : "")))
    .join("");
}
