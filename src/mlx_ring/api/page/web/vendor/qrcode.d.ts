// Types of qrcode.js as far as the page uses it, for the type checker alone.

export interface QrCode {
  addData(text: string): void;
  make(): void;
  getModuleCount(): number;
  isDark(row: number, column: number): boolean;
}

/** With type number 0 the smallest code that holds the data is made. */
export function qrcode(typeNumber: number, errorCorrection: "L" | "M" | "Q" | "H"): QrCode;
