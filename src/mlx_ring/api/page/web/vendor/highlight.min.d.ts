// Types of highlight.min.js as far as the page uses it, for the type checker alone.

/** Text, or a part of the code with its kind. */
export type Token = string | { scope?: string; children: Token[] };

export interface Highlighter {
  getLanguage(name: string): object | undefined;
  highlight(
    code: string,
    options: { language: string; ignoreIllegals: boolean },
  ): { _emitter: { rootNode: { children: Token[] } } };
}

declare const highlighter: Highlighter;
export default highlighter;
