import assert from "node:assert/strict";
import { test } from "node:test";
import { readFiles } from "../../../src/mlx_ring/api/page/web/chat/attachments.js";

/** @param {BlobPart} content @param {string} name @param {string} [type] as a browser tells it */
const file = (content, name, type = "") => new File([content], name, { type });

test("files of text are sent whatever the browser takes them for", async () => {
  const { text, problem } = await readFiles([
    file("let a = 1;\n", "app.ts", "video/mp2t"),
    file("<svg/>", "logo.svg", "image/svg+xml"),
    file("größer", "README"),
  ]);
  assert.equal(problem, "");
  assert.equal(text, "app.ts:\n```ts\nlet a = 1;\n```\n\nlogo.svg:\n```svg\n<svg/>\n```\n\nREADME:\n```\ngrößer\n```");
});

test("other content is refused by name, and a fence is longer than those in the file", async () => {
  const { text, problem } = await readFiles([
    file(new Uint8Array([0x89, 0x50, 0xff]), "photo.txt", "text/plain"),
    file("a\0b", "nul.txt"),
    file("```\ncode\n```", "notes.md"),
  ]);
  assert.equal(
    problem,
    "photo.txt is not text in UTF-8. Only text can be sent. nul.txt is not text in UTF-8. Only text can be sent.",
  );
  assert.equal(text, "notes.md:\n````md\n```\ncode\n```\n````");
});

test("a question takes about a megabyte of files, with what it has already, and one sentence names the rest", async () => {
  const part = "x".repeat(400_000);
  const files = ["a.txt", "b.txt", "c.txt", "d.txt"].map((name) => file(part, name));
  const { text, problem } = await readFiles(files);
  assert.equal(problem, "Left out, because a question takes up to 1 MB: c.txt, d.txt.");
  assert.equal(text.length, "a.txt:\n```txt\n\n```\n\nb.txt:\n```txt\n\n```".length + 800_000);
  const again = await readFiles(files.slice(2), text);
  assert.deepEqual(again, { text: "", problem });
  const large = await readFiles([file("x".repeat(1_100_000), "large.txt"), file("small", "small.txt")]);
  assert.equal(large.problem, "large.txt has 1.1 MB. Files of up to 1 MB can be sent.");
  assert.equal(large.text, "small.txt:\n```txt\nsmall\n```");
});
