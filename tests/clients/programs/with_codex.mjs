// Codex, OpenAI's agent for terminals, without a terminal: `codex exec`.
import { spawnSync } from "node:child_process";
import { mkdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { KEY, MODEL, QUESTION, URL, WRONG_KEY, check, equal, expect, run } from "./checks.mjs";

const PROGRAM = join(dirname(fileURLToPath(import.meta.url)), "node_modules", "@openai", "codex", "bin", "codex.js");
const CONFIG = (model) => `
model = "${model}"
model_provider = "mlx-ring"

[model_providers.mlx-ring]
name = "mlx-ring"
base_url = "${URL}/v1"
env_key = "MLX_RING_KEY"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
`;

// Return the events of one task.
const ask = (key, model) => {
  const folder = join(process.env.HOME, ".codex");
  mkdirSync(folder, { recursive: true });
  writeFileSync(join(folder, "config.toml"), CONFIG(model));
  const command = [PROGRAM, "exec", "--skip-git-repo-check", "--json", "--sandbox", "read-only", QUESTION];
  const env = { ...process.env, MLX_RING_KEY: key };
  const done = spawnSync(process.execPath, command, { env, input: "", encoding: "utf8", timeout: 200_000 });
  const lines = done.stdout.split("\n").filter((line) => line.startsWith("{"));
  expect(lines.length > 0, [done.status, done.stderr]);
  return lines.map((line) => JSON.parse(line));
};

// The demo model knows nothing of a prompt of 16,000 tokens: that it is read, and the answer, are what counts.
check("a task", async () => {
  const events = ask(KEY, MODEL);
  const last = events.at(-1);
  equal(last.type, "turn.completed");
  expect(last.usage.input_tokens > 10_000 && last.usage.output_tokens > 0, last);
  equal(events.filter((event) => event.type === "error"), []);
});

check("errors", async () => {
  const messageOf = (key, model) => ask(key, model).at(-1).error.message;
  const wrongKey = messageOf(WRONG_KEY, MODEL);
  expect(wrongKey.includes("401") && wrongKey.includes("API key"), wrongKey);
  const unknown = messageOf(KEY, "no/such-model");
  expect(unknown.includes("no/such-model"), unknown);
});

await run();
