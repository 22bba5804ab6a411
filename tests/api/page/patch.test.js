import assert from "node:assert/strict";
import { test } from "node:test";
import { applyPatch } from "../../../src/mlx_ring/api/page/web/patch.js";

/** @import { PatchOperation } from "../../../src/mlx_ring/api/page/web/types.js" */

/** @type {[name: string, before: any, operations: PatchOperation[], after: any][]} */
const CASES = [
  ["nothing changes", { a: 1 }, [], { a: 1 }],
  ["add", { a: 1 }, [{ op: "add", path: "/b", value: [2] }], { a: 1, b: [2] }],
  ["replace", { a: 1 }, [{ op: "replace", path: "/a", value: null }], { a: null }],
  ["replace the whole", { a: 1 }, [{ op: "replace", path: "", value: { b: 2 } }], { b: 2 }],
  ["remove", { a: 1, b: 2 }, [{ op: "remove", path: "/a" }], { b: 2 }],
  ["nested", { a: { b: { c: 1 } } }, [{ op: "replace", path: "/a/b/c", value: 2 }], { a: { b: { c: 2 } } }],
  [
    "inside a list",
    { a: [{ b: 1 }, { b: 2 }] },
    [{ op: "replace", path: "/a/1/b", value: 3 }],
    { a: [{ b: 1 }, { b: 3 }] },
  ],
  ["item of a list", { a: [1, 2] }, [{ op: "replace", path: "/a/0", value: 9 }], { a: [9, 2] }],
  [
    "escaped names",
    { "a/b": 1, "c~d": 2 },
    [
      { op: "replace", path: "/a~1b", value: 3 },
      { op: "remove", path: "/c~0d" },
    ],
    { "a/b": 3 },
  ],
  ["escape of an escape", { "~1": 1 }, [{ op: "replace", path: "/~01", value: 2 }], { "~1": 2 }],
  ["empty name", { "": 1 }, [{ op: "replace", path: "/", value: 2 }], { "": 2 }],
  [
    "in order",
    { a: 1 },
    [
      { op: "add", path: "/b", value: { c: 1 } },
      { op: "add", path: "/b/d", value: 2 },
      { op: "remove", path: "/b/c" },
    ],
    { a: 1, b: { d: 2 } },
  ],
];

for (const [name, before, operations, after] of CASES) {
  test(name, () => {
    const untouched = structuredClone(before);
    assert.deepEqual(applyPatch(before, operations), after);
    assert.deepEqual(before, untouched);
  });
}

test("untouched values are the same objects as before", () => {
  const before = { a: { b: 1 }, c: { d: 1 } };
  const after = applyPatch(before, [{ op: "replace", path: "/a/b", value: 2 }]);
  assert.equal(after.c, before.c);
  assert.notEqual(after.a, before.a);
});

test("a missing path is an error", () => {
  assert.throws(() => applyPatch({ a: 1 }, [{ op: "replace", path: "/b/c", value: 2 }]), /names c/);
  assert.throws(() => applyPatch({ a: 1 }, [{ op: "replace", path: "/a/b/c", value: 2 }]), TypeError);
  assert.throws(() => applyPatch(/** @type {any} */ (null), [{ op: "add", path: "/a", value: 2 }]), TypeError);
});

test("a name of the object prototype is data", () => {
  const after = applyPatch(/** @type {any} */ ({}), [{ op: "add", path: "/constructor", value: 1 }]);
  assert.deepEqual(Object.keys(after), ["constructor"]);
});
