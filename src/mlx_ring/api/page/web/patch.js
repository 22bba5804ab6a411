// JSON patches (RFC 6902), as far as the server sends them: add, remove and replace in objects, replace in lists.

/** The document after the operations. What they touch is copied, so that what was drawn can be compared. */
export function patched(document, operations) {
  return operations.reduce((value, { op, path, value: given }) => at(value, parts(path), op, given), document);
}

function parts(path) {
  return path.split("/").slice(1).map((part) => part.replaceAll("~1", "/").replaceAll("~0", "~"));
}

function at(value, path, op, given) {
  if (!path.length) return given;
  const [name, ...inner] = path;
  const copy = Array.isArray(value) ? [...value] : { ...value };
  if (inner.length) copy[name] = at(copy[name], inner, op, given);
  else if (op === "remove") delete copy[name];
  else copy[name] = given;
  return copy;
}
