// The cards that invite another machine, by a command to run there, and a phone, by a link. Both can be scanned.

/** @import { JoinCommands } from "../types.js" */

import { ApiError, request } from "../api.js";
import { CopyButton, Notice, onSingleClick } from "../components.js";
import { duration } from "../format.js";
import { html, useEffect, useState } from "../vendor/preact.js";

/** Light modules around a QR code, which readers need. */
const MARGIN = 4;
const LOCAL = "This server answers on its own machine alone. To use it from others, start it with `--host 0.0.0.0`.";

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
 * Render the card with the server's addresses for phones and other machines.
 * @param {{ urls: string[] }} props
 */
export function OtherDevices({ urls }) {
  const [chosen, setChosen] = useState(0);
  const url = urls[chosen] ?? urls[0];
  return html`<section class="panel add-machine" aria-label="Use it from a phone">
    <header><h2>Use it from a phone</h2></header>
    ${
      url
        ? html`<div class="invitation">
            <${QrPicture} text=${url} label="QR code of the address" />
            <div class="grow">
              <p>
                Scan the code, or type an address. The phone must be in the same network. If the server asks for an
                API key, type it there.
              </p>
              <${Choices} name="address" texts=${urls} chosen=${chosen} onChoose=${setChosen} />
            </div>
          </div>`
        : html`<p class="muted">${withCommands(LOCAL)}</p>`
    }
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
    <${QrPicture} text=${command} label="QR code of the command" />
    <div class="grow">
      <p>Run this on the other machine. It works once, for ${duration(lifeS)}. Keep it secret until then.</p>
      <${Choices} name="command" texts=${commands} chosen=${chosen} onChoose=${setChosen} />
      ${commands.length > 1 && html`<p class="muted">Use one whose address the other machine can reach.</p>`}
    </div>
  </div>`;
}

/**
 * Render texts to copy. The chosen one is shown as a code.
 * @param {{ name: string, texts: string[], chosen: number, onChoose: (place: number) => void }} props
 */
function Choices({ name, texts, chosen, onChoose }) {
  return texts.map(
    (each, place) => html`<div key=${each} class="row command">
      ${
        texts.length > 1 &&
        html`<input
          type="radio"
          name=${name}
          aria-label=${`Show the code of ${name} ${place + 1}`}
          checked=${place === chosen}
          onChange=${() => onChoose(place)}
        />`
      }
      <code class="grow">${each}</code>
      <${CopyButton} text=${() => each} what=${`${name} ${place + 1}`} />
    </div>`,
  );
}

/** @param {{ text: string, label: string }} props */
function QrPicture({ text, label }) {
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
  return html`<svg class="qr" viewBox="0 0 ${size} ${size}" role="img" aria-label=${label}>
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
