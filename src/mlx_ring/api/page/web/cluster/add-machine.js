// The cards that invite another machine, by a command to run there, and a phone, by a link. Both can be scanned.

/** @import { ClusterStatus } from "../types.js" */
/** @import { Invitation } from "./invitation.js" */

import { CopyButton, unbroken } from "../components.js";
import { StartCommand } from "../connection.js";
import { html, useEffect, useState } from "../vendor/preact.js";
import { Invite } from "./invitation.js";

/** Light modules around a QR code, which readers need. */
const MARGIN = 4;
/**
 * Render the card. It asks for a token only when the button is pressed.
 * @param {{ cluster: ClusterStatus, invitation: Invitation }} props
 */
export function AddMachine({ cluster, invitation }) {
  const show = (/** @type {string[]} */ commands) => html`<${Commands} commands=${commands} />`;
  return html`<section class="panel add-machine" aria-label="Add a machine">
    <header><h2>Add a machine</h2></header>
    ${
      cluster.join_refusal
        ? html`<p>
              This server uses one machine alone. Others can join after a restart. Chats and downloaded models stay.
              Stop it with Ctrl+C, then run:
            </p>
            <${StartCommand} cluster=${cluster} nodes=${2} />`
        : html`<p class="muted">Install the same version of mlx-ring there, then run a command that this page makes.</p>
            <${Invite} invitation=${invitation} cluster=${cluster} show=${show} />`
    }
  </section>`;
}

/**
 * Render the card with the server's addresses for phones and other machines.
 * @param {{ cluster: ClusterStatus }} props
 */
export function OtherDevices({ cluster }) {
  const { urls } = cluster;
  const [chosen, setChosen] = useState(0);
  const url = urls[chosen] ?? urls[0];
  return html`<section class="panel add-machine" aria-label="Use it from a phone">
    <header><h2>Use it from a phone</h2></header>
    ${
      url
        ? html`<div class="invitation">
            <${QrPicture} text=${url} label="QR code of the address" caption="The address as a QR code" />
            <div class="grow">
              <p>
                Scan the code, or type an address. The phone must be in the same network. If the server asks for an
                API key, type it there.
              </p>
              <${Choices} name="address" texts=${urls} chosen=${chosen} onChoose=${setChosen} />
            </div>
          </div>`
        : html`<p>This server answers on its own machine alone. Others can use it after a restart:</p>
            <${StartCommand} cluster=${cluster} opens=${true} />`
    }
  </section>`;
}

/** @param {{ commands: string[] }} props */
function Commands({ commands }) {
  const [chosen, setChosen] = useState(0);
  const command = commands[chosen] ?? commands[0] ?? "";
  return html`<div class="invitation">
    <${QrPicture} text=${command} label="QR code of the command" caption="The command as a QR code" />
    <div class="grow">
      <${Choices} name="command" texts=${commands} chosen=${chosen} onChoose=${setChosen} />
      ${
        commands.length > 1 &&
        html`<p class="muted">
          They differ in this machine's address. Use one that <code>ping</code> reaches from there: often the one that
          begins like that machine's own address. The marked one is the QR code.
        </p>`
      }
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
      <code class="grow">${unbroken(each)}</code>
      <${CopyButton} text=${() => each} what=${`${name} ${place + 1}`} />
    </div>`,
  );
}

/** @param {{ text: string, label: string, caption: string }} props */
function QrPicture({ text, label, caption }) {
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
  return html`<figure>
    <svg class="qr" viewBox="0 0 ${size} ${size}" role="img" aria-label=${label}>
      <rect width=${size} height=${size} fill="#fff" />
      <path fill="#000" d=${squaresPath(squares)} />
    </svg>
    <figcaption class="muted">${caption}</figcaption>
  </figure>`;
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
