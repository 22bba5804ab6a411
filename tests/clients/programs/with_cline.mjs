// Cline's agent for terminals, without a terminal: `cline --json`.
import { spawn, spawnSync } from "node:child_process";
import { once } from "node:events";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";
import { KEY, MODEL, QUESTION, URL, WRONG_KEY, check, equal, expect, run } from "./checks.mjs";

const PACKAGES = join(dirname(fileURLToPath(import.meta.url)), "node_modules");
const PROGRAM = join(PACKAGES, "@cline", "cli-linux-x64", "bin", "cline");
// Without this, it leaves a process of its own in the background.
const OPTIONS = { env: { ...process.env, CLINE_SESSION_BACKEND_MODE: "local" }, killSignal: "SIGKILL" };

const setUp = (key, model) => {
  const command = ["auth", "-p", "openai", "-k", key, "-b", `${URL}/v1`, "-m", model];
  const done = spawnSync(PROGRAM, command, { ...OPTIONS, input: "", encoding: "utf8", timeout: 100_000 });
  equal([done.status, done.signal], [0, null], done.stderr);
};

const numberOfRunning = async () => {
  const answer = await fetch(`${URL}/cache/stats`, { headers: { authorization: `Bearer ${KEY}` } });
  return (await answer.json()).running;
};

// Return its text and its error, whichever comes first, and how many requests the server computes at that moment.
// It is killed then: it sets no max_tokens, and the demo model would write until its context is full.
const ask = async (key, model) => {
  setUp(key, model);
  const command = ["--json", "--auto-approve", "false", "--retries", "1", QUESTION];
  const started = spawn(PROGRAM, command, { ...OPTIONS, stdio: ["ignore", "pipe", "ignore"], timeout: 200_000 });
  const ended = once(started, "close");
  try {
    for await (const line of createInterface({ input: started.stdout })) {
      if (!line.startsWith("{")) continue;
      const { type, event, finishReason, text } = JSON.parse(line);
      if (event?.contentType === "text") return { text: event.text, running: await numberOfRunning() };
      if (type === "run_result" && finishReason === "error") return { error: text };
    }
    return {};
  } finally {
    started.kill("SIGKILL");
    await ended;
  }
};

// The demo model knows nothing of a prompt of 7,000 tokens: that it is read and its text shown are what counts.
check("a task's prompt, tools and stream", async () => {
  const { text, running } = await ask(KEY, MODEL);
  expect(text?.length > 0 && running === 1, [text, running]);
});

check("errors", async () => {
  const wrongKey = await ask(WRONG_KEY, MODEL);
  expect(wrongKey.error?.includes("API key"), wrongKey);
  const unknown = await ask(KEY, "no/such-model");
  expect(unknown.error?.includes("no/such-model"), unknown);
});

await run();
