// opencode, an agent for terminals, without a terminal: `opencode run`.
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { ANSWER, KEY, MODEL, QUESTION, URL, WRONG_KEY, check, equal, expect, run } from "./checks.mjs";

const PROGRAM = join(dirname(fileURLToPath(import.meta.url)), "node_modules", "opencode-linux-x64", "bin", "opencode");
const CONFIG = (key, model) => ({
  share: "disabled",
  agent: { plain: { mode: "primary", prompt: "You answer.", tools: { "*": false } } },
  provider: {
    "mlx-ring": {
      npm: "@ai-sdk/openai-compatible",
      name: "mlx-ring",
      options: { baseURL: `${URL}/v1`, apiKey: key },
      models: { [model]: { name: model, tool_call: true, limit: { context: 32768, output: 64 } } },
    },
  },
});

// Return the events of one task. With a title, opencode does not ask the model for one.
const ask = (key, model, ...more) => {
  writeFileSync(join(process.env.HOME, "opencode.json"), JSON.stringify(CONFIG(key, model)));
  const options = ["--pure", "--title", "task", "--format", "json", "-m", `mlx-ring/${model}`, ...more];
  const done = spawnSync(PROGRAM, ["run", ...options, QUESTION], {
    cwd: process.env.HOME,
    // It reads the settings of the folder in PWD, which another working directory does not change.
    env: { ...process.env, PWD: process.env.HOME },
    input: "",
    encoding: "utf8",
    timeout: 200_000,
    killSignal: "SIGKILL",
  });
  const lines = done.stdout.split("\n").filter((line) => line.startsWith("{"));
  expect(lines.length > 0, [done.status, done.signal, done.stderr]);
  return lines.map((line) => JSON.parse(line));
};

// Return the model's text and the token counts of a task without errors.
const answerOf = (events) => {
  equal(
    events.filter((event) => event.type === "error"),
    [],
  );
  equal(events.at(-1).type, "step_finish");
  const texts = events.filter((event) => event.type === "text");
  return { text: texts.map((event) => event.part.text).join(""), tokens: events.at(-1).part.tokens };
};

check("a task", async () => {
  const { text, tokens } = answerOf(ask(KEY, MODEL, "--agent", "plain"));
  equal(text, ANSWER);
  expect(tokens.input > 0 && tokens.output > 0, tokens);
});

// The demo model knows nothing of a prompt of 13,000 tokens: that it is read, and the answer, are what counts.
check("its own prompt and tools", async () => {
  const { text, tokens } = answerOf(ask(KEY, MODEL));
  expect(text.length > 0 && tokens.input > 5_000 && tokens.output > 0, [text, tokens]);
});

check("errors", async () => {
  const messageOf = (key, model) =>
    JSON.stringify(ask(key, model, "--agent", "plain").find((event) => event.type === "error"));
  const wrongKey = messageOf(WRONG_KEY, MODEL);
  expect(wrongKey?.includes("API key"), wrongKey);
  const unknown = messageOf(KEY, "no/such-model");
  expect(unknown?.includes("no/such-model"), unknown);
});

await run();
