// Files as text of a question. Models get text alone, so other files are refused.

import { bytes } from "../format.js";
import { fenced } from "./export.js";

/** Largest file in bytes: a larger one fits in no usual context. */
const MAX_FILE = 1e6;

/**
 * Return the files as text for a question, and in a sentence each why others cannot be sent.
 * @param {File[]} files
 * @returns {Promise<{ text: string, problem: string }>}
 */
export async function readFiles(files) {
  const [texts, problems] = [/** @type {string[]} */ ([]), /** @type {string[]} */ ([])];
  for (const file of files) {
    const problem = findProblem(file);
    const text = problem ? null : await readText(file);
    if (text === null) problems.push(problem || `${file.name} is not text in UTF-8. Only text can be sent.`);
    else texts.push(`${file.name}:\n${fenced(text.trimEnd(), languageOf(file.name))}`);
  }
  return { text: texts.join("\n\n"), problem: problems.join(" ") };
}

/** @param {Pick<File, "name" | "type" | "size">} file */
function findProblem({ name, type, size }) {
  if (/^(image|audio|video)\//.test(type)) return `${name} is no text. Only text can be sent.`;
  return size > MAX_FILE ? `${name} has ${bytes(size)}. Files of up to ${bytes(MAX_FILE)} can be sent.` : "";
}

/**
 * Return the text of a file. Null if it has other content, or cannot be read, as a folder.
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
