// Claude Code, Anthropic's agent for terminals, without a terminal: `claude -p`.
import { spawnSync } from "node:child_process";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { KEY, MODEL, QUESTION, URL, WRONG_KEY, check, equal, expect, run } from "./checks.mjs";

const PACKAGE = join(dirname(fileURLToPath(import.meta.url)), "node_modules", "@anthropic-ai", "claude-code");

// Return the result of one task. Its own prompt and tools would fill the demo model's context.
const ask = (key, model, ...more) => {
  const options = ["--output-format", "json", "--system-prompt", "You answer.", "--tools", "", ...more];
  const env = { ...process.env, ANTHROPIC_BASE_URL: URL, ANTHROPIC_AUTH_TOKEN: key, CLAUDE_CODE_MAX_RETRIES: "0" };
  const command = [join(PACKAGE, "cli-wrapper.cjs"), "-p", QUESTION, "--model", model, ...options];
  const done = spawnSync(process.execPath, command, { env, input: "", encoding: "utf8", timeout: 200_000 });
  expect(done.stdout.startsWith("{"), [done.status, done.stdout, done.stderr]);
  return JSON.parse(done.stdout);
};

check("a task", async () => {
  const result = ask(KEY, MODEL);
  equal([result.is_error, result.subtype, result.num_turns], [false, "success", 1]);
  expect(result.result.length > 0 && result.usage.input_tokens > 0 && result.usage.output_tokens > 0, result);
});

check("errors", async () => {
  equal([ask(WRONG_KEY, MODEL), ask(KEY, "no/such-model")].map((result) => [result.is_error, result.api_error_status]), [
    [true, 401],
    [true, 404],
  ]);
});

await run();
