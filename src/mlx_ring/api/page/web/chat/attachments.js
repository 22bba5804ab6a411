// Files as text of a question. Models get text alone, so other files are refused.

import { bytes } from "../format.js";
import { fenced } from "./export.js";

/** Longest question with files, and largest file, in bytes: longer ones fit in no usual context. */
const MAX_BYTES = 1e6;

/**
 * Return the files as text for a question, and in a sentence each why others cannot be sent.
 * @param {File[]} files
 * @param {string} [before] text that the question has already
 * @returns {Promise<{ text: string, problem: string }>}
 */
export async function readFiles(files, before = "") {
  const [texts, problems, left] = [
    /** @type {string[]} */ ([]),
    /** @type {string[]} */ ([]),
    /** @type {string[]} */ ([]),
  ];
  let room = MAX_BYTES - new TextEncoder().encode(before).length;
  for (const file of files) {
    const { name, size } = file;
    if (size > MAX_BYTES) {
      problems.push(`${name} has ${bytes(size)}. Files of up to ${bytes(MAX_BYTES)} can be sent.`);
      continue;
    }
    if (size > room) {
      left.push(name);
      continue;
    }
    const text = await readText(file);
    if (text === null) {
      problems.push(`${name} is not text in UTF-8. Only text can be sent.`);
      continue;
    }
    room -= size;
    texts.push(`${name}:\n${fenced(text.trimEnd(), languageOf(name))}`);
  }
  if (left.length) problems.push(`Left out, because a question takes up to ${bytes(MAX_BYTES)}: ${left.join(", ")}.`);
  return { text: texts.join("\n\n"), problem: problems.join(" ") };
}

/**
 * Return the text of a file. Null if it has other content, or cannot be read, as a folder. The browser's type does not
 * count: it takes a program in TypeScript for a video.
 * @param {File} file
 */
async function readText(file) {
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    return text.includes("\0") ? null : text;
  } catch {
    return null;
  }
}

/**
 * Return the ending of a file's name, which often names its language.
 * @param {string} name
 */
function languageOf(name) {
  return /\.([a-z0-9]{1,10})$/i.exec(name)?.[1]?.toLowerCase() ?? "";
}
