import assert from "node:assert/strict";
import { test } from "node:test";
import { makeSquares, squaresPath } from "../../../src/mlx_ring/api/page/web/cluster/add-machine.js";

test("a QR code is a square with its three corner marks, and large enough for a join command", async () => {
  const squares = await makeSquares(`mlx-ring join 192.168.100.200:50051 --token mlxring1${"a2".repeat(48)}`);
  assert.ok(squares.length >= 45 && squares.every((row) => row.length === squares.length));
  const last = squares.length - 7;
  for (const [y, x] of /** @type {[number, number][]} */ ([
    [0, 0],
    [0, last],
    [last, 0],
  ])) {
    assert.deepEqual(squares[y]?.slice(x, x + 7), Array(7).fill(true));
    assert.deepEqual(squares[y + 1]?.slice(x, x + 7), [true, ...Array(5).fill(false), true]);
  }
});

test("dark squares are drawn behind a light margin", () => {
  assert.equal(
    squaresPath([
      [true, false],
      [false, true],
    ]),
    "M4 4h1v1h-1zM5 5h1v1h-1z",
  );
});
