// Types of preact.js, for the type checker alone. They come from preact's npm package.

import type { VNode } from "preact";

export { Component, createContext, h, render } from "preact";
export {
  useCallback,
  useContext,
  useEffect,
  useErrorBoundary,
  useLayoutEffect,
  useMemo,
  useReducer,
  useRef,
  useState,
} from "preact/hooks";

/** htm, bound to `h`. */
export function html(strings: TemplateStringsArray, ...values: unknown[]): VNode;
