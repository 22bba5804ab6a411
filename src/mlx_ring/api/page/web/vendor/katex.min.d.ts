// Types of katex.min.js as far as the page uses it, for the type checker alone. The script sets `window.katex`.

export interface MathTree {
  type?: string;
  /** Of a leaf. */
  text?: string;
  attributes?: Record<string, string>;
  children?: MathTree[];
  toNode(): Node;
}

export interface Katex {
  /** Throws for LaTeX that is not valid. */
  __renderToDomTree(source: string, options: object): MathTree;
}
