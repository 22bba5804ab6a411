import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { describeLife, Invitation, whatCame } from "../../../src/mlx_ring/api/page/web/cluster/invitation.js";
import { startCommand, whatIsMissing } from "../../../src/mlx_ring/api/page/web/connection.js";
import { setUpBrowser } from "./support.js";

setUpBrowser();

/** @param {string[]} connected @param {string[]} [absent] @returns {any} */
const cluster = (connected, absent = []) => ({
  nodes: connected.map((id) => ({ id, name: id, state: "attending" })),
  absent_nodes: absent,
});

test("a command tells machines that are joining or have joined from those that were members before", async () => {
  mock.method(globalThis, "fetch", async () => Response.json({ commands: ["join"], expires_in_s: 60 }));
  const invitation = new Invitation();
  assert.deepEqual(whatCame(invitation.now, cluster(["new"])), { joined: [], joining: [], left: [], back: [] });
  await invitation.make(cluster(["head"], ["old"]));
  assert.deepEqual([invitation.now.commands, invitation.now.isBusy], [["join"], false]);
  /** @param {any} now @param {object} came */
  const becomes = (now, came) =>
    assert.deepEqual(whatCame(invitation.now, now), { joined: [], joining: [], left: [], back: [], ...came });
  becomes(cluster(["head"], ["old"]), {});
  becomes(cluster(["head"], ["new", "old"]), { joining: ["new"] });
  const after = cluster(["head", "new"], ["old"]);
  becomes(after, { joined: ["new"] });
  after.nodes[1].state = "gone";
  becomes(after, { left: ["new"] });
});

test("a member that comes back, or leaves, is not the machine that a command has admitted", async () => {
  mock.method(globalThis, "fetch", async () => Response.json({ commands: ["join"], expires_in_s: 60 }));
  const invitation = new Invitation();
  const before = cluster(["head", "stays", "lost"], ["old"]);
  before.nodes[2].state = "gone";
  await invitation.make(before);
  assert.deepEqual(whatCame(invitation.now, cluster(["head", "stays", "lost", "old"])), {
    joined: [],
    joining: [],
    left: [],
    back: ["lost", "old"],
  });
  assert.deepEqual(whatCame(invitation.now, cluster(["head"], ["stays", "lost", "old"])), {
    joined: [],
    joining: [],
    left: [],
    back: [],
  });
});

test("a refused command is a problem, and the former one stays", async () => {
  const invitation = new Invitation();
  mock.method(globalThis, "fetch", async () =>
    Response.json({ error: { message: "Not from here." } }, { status: 403 }),
  );
  await invitation.make(cluster([]));
  assert.deepEqual(
    [invitation.now.problem, invitation.now.commands, invitation.now.isBusy],
    ["Not from here.", [], false],
  );
});

test("the life of a command counts down", () => {
  const texts = [3_600_000, 119_000, 59_000, 0].map(describeLife);
  assert.deepEqual(texts, [
    "It works once, within 1 h. Keep it secret until then.",
    "It works once, within 2 min. Keep it secret until then.",
    "It works once, within less than a minute. Keep it secret until then.",
    "This command has expired: make another one.",
  ]);
});

test("the start command names the models, and what the page knows of the options", () => {
  /** @type {any} */
  const plain = { models: [{ model: "demo" }], urls: [], nodes: [], join_refusal: "One machine." };
  assert.equal(startCommand(plain, { port: "8100", hasKey: false }), "mlx-ring serve demo");
  const checkout = { ...plain, program: ".venv/bin/mlx-ring" };
  assert.equal(startCommand(checkout, { port: "8100", hasKey: false }), ".venv/bin/mlx-ring serve demo");
  /** @type {any} */
  const full = {
    program: "my tools/mlx-ring",
    models: [{ model: "org/m" }, { model: "m", start_name: "/it's my/m" }],
    urls: ["http://mini:9000"],
    nodes: ["attending", "attending", "attending", "gone"].map((state) => ({ state })),
    join_refusal: null,
  };
  assert.equal(
    startCommand(full, { port: "9000", hasKey: true }),
    "'my tools/mlx-ring' serve org/m '/it'\\''s my/m' --nodes 3 --port 9000 --host 0.0.0.0 --api-key KEY",
  );
  assert.equal(startCommand(plain, { nodes: 2, port: "", hasKey: false }), "mlx-ring serve demo --nodes 2");
});

test("a person is asked for the secrets that the start command lacks, and no others", () => {
  const rest = "Run it in the same folder and with the same environment variables as before.";
  const missing = (/** @type {string} */ command) => whatIsMissing({ options: [] }, `mlx-ring serve demo${command}`);
  assert.equal(missing(" --api-key-file KEYS"), rest);
  assert.equal(missing(" --api-key KEY"), `Put your own in place of KEY. ${rest}`);
  assert.equal(
    missing(" --api-key KEY --ssl-keyfile-password PASSWORD"),
    `Put your own in place of KEY and PASSWORD. ${rest}`,
  );
  assert.match(whatIsMissing({}, "mlx-ring serve"), /Add the other options/);
});

test("the start command has the options with which the server was started, each once", () => {
  /** @type {any} */
  const started = {
    models: [{ model: "demo" }],
    urls: ["http://mini:8200"],
    nodes: [],
    join_refusal: null,
    options: [
      "--stages",
      "2",
      "--port",
      "8200",
      "--host",
      "::",
      "--api-key",
      "KEY",
      "--nodes",
      "3",
      "--run-dir",
      "a b",
    ],
  };
  const all = "--stages 2 --port 8200 --host :: --api-key KEY --nodes";
  assert.equal(startCommand(started, { port: "8200", hasKey: true }), `mlx-ring serve demo ${all} 3 --run-dir 'a b'`);
  assert.equal(
    startCommand(started, { nodes: 4, port: "8200", hasKey: true }),
    `mlx-ring serve demo ${all} 4 --run-dir 'a b'`,
  );
  const fromFile = { ...started, options: ["--config", "ring.yaml"] };
  assert.equal(startCommand(fromFile, { port: "9000", hasKey: true }), "mlx-ring serve demo --config ring.yaml");
  assert.equal(
    startCommand(fromFile, { nodes: 2, port: "9000", hasKey: true }),
    "mlx-ring serve demo --config ring.yaml --nodes 2",
  );
  assert.equal(
    startCommand(fromFile, { opens: true, port: "9000", hasKey: false }),
    "mlx-ring serve demo --config ring.yaml --host 0.0.0.0 --api-key KEY",
  );
  const alone = { ...started, urls: [], join_refusal: "One.", options: ["--host", "127.0.0.1", "--stages", "2"] };
  assert.equal(
    startCommand(alone, { opens: true, port: "8100", hasKey: false }),
    "mlx-ring serve demo --host 0.0.0.0 --stages 2 --api-key KEY",
  );
  const fromKeys = { ...started, urls: [], join_refusal: "One.", options: ["--api-key-file", "keys"] };
  assert.equal(
    startCommand(fromKeys, { port: "9000", hasKey: true }),
    "mlx-ring serve demo --api-key-file keys --port 9000",
  );
});

test("the start command has the port that was given for any free one, and options of any name", () => {
  /** @type {any} */
  const started = { models: [{ model: "demo" }], urls: [], nodes: [], join_refusal: "One.", options: [] };
  const command = (/** @type {string[]} */ ...options) =>
    startCommand({ ...started, options }, { port: "40123", hasKey: false });
  assert.equal(command("--port", "0", "--stages", "2"), "mlx-ring serve demo --port 40123 --stages 2");
  const odd = command("--log-dir", "constructor", "--nodes", "2", "--port", "8200");
  assert.equal(odd, "mlx-ring serve demo --log-dir constructor --nodes 2 --port 8200");
});

test("a person is asked for the folders and parts of URLs that the start command lacks", () => {
  const missing = whatIsMissing(
    { options: [] },
    "serve --state-dir DIR --api-key-file FILE --api-key KEY --at http://h",
  );
  assert.match(
    missing,
    /^Put your own in place of KEY, FILE and DIR\. Addresses may lack a path, user or password\. Run/,
  );
});
