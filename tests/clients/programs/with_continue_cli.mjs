// Continue's agent for terminals, without a terminal: `cn -p`.
import { spawnSync } from "node:child_process";
import { writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { ANSWER, KEY, MODEL, QUESTION, URL, WRONG_KEY, check, equal, expect, run } from "./checks.mjs";

const PROGRAM = join(dirname(fileURLToPath(import.meta.url)), "node_modules", "@continuedev", "cli", "dist", "cn.js");
const CONFIG = (key, model) => `
name: mlx-ring
version: 0.0.1
schema: v1
models:
  - name: ${model}
    provider: openai
    model: ${model}
    apiBase: ${URL}/v1
    apiKey: ${key}
    roles: [chat]
    capabilities: [tool_use]
`;

// Return what one task prints; an error goes to the other stream.
const ask = (key, model) => {
  const file = join(process.env.HOME, "config.yaml");
  writeFileSync(file, CONFIG(key, model));
  const command = [PROGRAM, "-p", "--readonly", "--config", file, QUESTION];
  const limits = { timeout: 120_000, killSignal: "SIGKILL" };
  const done = spawnSync(process.execPath, command, { input: "", encoding: "utf8", ...limits });
  const [answer, problem] = [done.stdout.trim(), done.stderr.trim()];
  expect(answer || problem, done.status);
  return answer || problem;
};

check("a task", async () => equal(ask(KEY, MODEL), ANSWER));

check("errors", async () => {
  const wrongKey = ask(WRONG_KEY, MODEL);
  expect(wrongKey.includes("401") && wrongKey.includes("API key"), wrongKey);
  const unknown = ask(KEY, "no/such-model");
  expect(unknown.includes("404") && unknown.includes("no/such-model"), unknown);
});

await run();
