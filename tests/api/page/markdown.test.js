import assert from "node:assert/strict";
import { describe, test } from "node:test";
import { parseBlocks } from "../../../src/mlx_ring/api/page/web/markdown/blocks.js";
import { toHtml } from "./support.js";

const box = (/** @type {boolean} */ isDone) =>
  `<input type="checkbox" disabled="true" checked="${isDone}" aria-label="${isDone ? "done" : "open"}">`;
const [OPEN, DONE] = [box(false), box(true)];
const LINK = 'target="_blank" rel="noopener noreferrer nofollow"';

/** @type {Record<string, [text: string, html: string][]>} */
const CASES = {
  "paragraphs and line breaks": [
    ["one\n\ntwo", "<p>one</p><p>two</p>"],
    ["one\ntwo", "<p>one<br>two</p>"],
    ["one\\\ntwo", "<p>one<br>two</p>"],
    ["one<br>two<BR/>\nthree<br />", "<p>one<br>two<br>three<br></p>"],
    ["1&nbsp;km, `<br>&nbsp;`", "<p>1\u00a0km, <code>&lt;br&gt;&amp;nbsp;</code></p>"],
    ["a &lt;b&gt; &amp;amp; &#8230; &#x1F642;", "<p>a &lt;b&gt; &amp;amp; … 🙂</p>"],
    ["AT&T &c; &toString; &#0; &#x110000; &#", "<p>AT&amp;T &amp;c; &amp;toString; \ufffd \ufffd &amp;#</p>"],
    ["&#xD800; &#56898; &#x61;", "<p>\ufffd \ufffd a</p>"],
    ["&ldquo;it&rsquo;s&rdquo; &alpha; &infin; &frac12;", "<p>“it’s” α ∞ ½</p>"],
    ["\\&lt;b> \\&#97;", "<p>&amp;lt;b&gt; &amp;#97;</p>"],
    ["one  \ntwo", "<p>one  <br>two</p>"],
    ["one\r\ntwo", "<p>one<br>two</p>"],
    ["", ""],
    [" \n\t\n", ""],
  ],
  emphasis: [
    ["*a* _b_", "<p><em>a</em> <em>b</em></p>"],
    ["**a** __b__", "<p><strong>a</strong> <strong>b</strong></p>"],
    ["***a***", "<p><strong><em>a</em></strong></p>"],
    ["~~a~~", "<p><s>a</s></p>"],
    ["**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"],
    ["*a **b***", "<p>*a <strong>b</strong>*</p>"],
    ["_a_b", "<p>_a_b</p>"],
    ["snake_case_name", "<p>snake_case_name</p>"],
    ["имя_файла_тест", "<p>имя_файла_тест</p>"],
    ["2 * 3 * 4", "<p>2 * 3 * 4</p>"],
    ["an **open end", "<p>an **open end</p>"],
    ["one *open and **strong** end", "<p>one *open and <strong>strong</strong> end</p>"],
    ["** a**", "<p>** a**</p>"],
    ["*a\\*", "<p>*a*</p>"],
  ],
  "escapes and HTML": [
    ["\\*a\\* \\# \\`", "<p>*a* # `</p>"],
    ["a \\q", "<p>a \\q</p>"],
    ["<b>1 & 2</b>", "<p>&lt;b&gt;1 &amp; 2&lt;/b&gt;</p>"],
    ["<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"],
    ["# <script>x</script>", "<h3>&lt;script&gt;x&lt;/script&gt;</h3>"],
    [
      "| <i>a</i> |\n|---|",
      '<div class="scroll" dir="ltr" tabIndex="0"><table><thead><tr><th>&lt;i&gt;a&lt;/i&gt;</th></tr></thead>' +
        "<tbody></tbody></table></div>",
    ],
    [
      "| a<br>b |\n|---|",
      '<div class="scroll" dir="ltr" tabIndex="0"><table><thead><tr><th>a<br>b</th></tr></thead><tbody></tbody></table></div>',
    ],
  ],
  "the direction of a block": [
    ["- עברית `ls`", '<ul dir="rtl"><li>עברית <code>ls</code></li></ul>'],
    ["- `ls` عنصر", '<ul dir="rtl"><li><code>ls</code> عنصر</li></ul>'],
    ["- $x^2$ عنصر", '<ul dir="rtl"><li><MathText>x^2</MathText> عنصر</li></ul>'],
    ["1. **Python**: لغة", "<ol><li><strong>Python</strong>: لغة</li></ol>"],
    ["> - عنصر", '<blockquote dir="rtl"><ul dir="rtl"><li>عنصر</li></ul></blockquote>'],
    [
      "| GPU | الذاكرة |\n|-|-|",
      '<div class="scroll" tabIndex="0"><table><thead><tr><th>GPU</th><th>الذاكرة</th></tr></thead><tbody></tbody></table></div>',
    ],
    ["- 1\n- `ls`", "<ul><li>1</li><li><code>ls</code></li></ul>"],
  ],
  formulas: [
    ["a $x^2$ b", "<p>a <MathText>x^2</MathText> b</p>"],
    ["\\(a*b*c\\)", "<p><MathText>a*b*c</MathText></p>"],
    ["$$\na\n\n- b\n$$\nend", '<MathText isDisplay="true">a\n\n- b</MathText><p>end</p>'],
    ["so\n\\[\nx\n\\]", '<p>so</p><MathText isDisplay="true">x</MathText>'],
    ["a $$x$$ b", '<p>a <MathText isDisplay="true">x</MathText> b</p>'],
    ["from $5 to $10", "<p>from $5 to $10</p>"],
    ["$5 or US$", "<p>$5 or US$</p>"],
    ["between $100 and $200/month (or 50$)", "<p>between $100 and $200/month (or 50$)</p>"],
    ["$2/hour for a year, or US$", "<p>$2/hour for a year, or US$</p>"],
    ["$5, $10 and $HOME/bin:$PATH", "<p>$5, $10 and $HOME/bin:$PATH</p>"],
    ["the $n$th of $2x^2$", "<p>the <MathText>n</MathText>th of <MathText>2x^2</MathText></p>"],
    ["$2 \\text{ if } x > 0 \\text{ or so}$", "<p><MathText>2 \\text{ if } x &gt; 0 \\text{ or so}</MathText></p>"],
    ["$5 = x$", "<p><MathText>5 = x</MathText></p>"],
    ["\\$x$", "<p>$x$</p>"],
    ["$$ open", "<p>$$ open</p>"],
    ["`$x$`", "<p><code>$x$</code></p>"],
  ],
  "code spans": [
    ["`a*b*`", "<p><code>a*b*</code></p>"],
    ["`` a`b ``", "<p><code>a`b</code></p>"],
    ["`open", "<p>`open</p>"],
    ["`a\nb`", "<p><code>a b</code></p>"],
    ["`<b>`", "<p><code>&lt;b&gt;</code></p>"],
  ],
  links: [
    ["![a map](https://a.example/x.png)!", `<p><a href="https://a.example/x.png" ${LINK}>a map</a>!</p>`],
    ["![ ](https://a.example/x.png)", `<p><a href="https://a.example/x.png" ${LINK}>https://a.example/x.png</a></p>`],
    ["[](https://a.example)", `<p><a href="https://a.example/" ${LINK}>https://a.example</a></p>`],
    [
      "[![build](https://a.example/b.svg)](https://a.example/ci) [![b](b.svg)](https://a.example)",
      `<p><a href="https://a.example/ci" ${LINK}><span>build</span></a> ` +
        `<a href="https://a.example/" ${LINK}><span>b</span></a></p>`,
    ],
    [
      "[x](https://a.example/?a=1&amp;b=2) https://a.example/?a&amp;b. <https://a.example/?a&#38;b&zz;>",
      `<p><a href="https://a.example/?a=1&amp;b=2" ${LINK}>x</a> ` +
        `<a href="https://a.example/?a&amp;b" ${LINK}>https://a.example/?a&amp;b</a>. ` +
        `<a href="https://a.example/?a&amp;b&amp;zz;" ${LINK}>https://a.example/?a&amp;b&amp;zz;</a></p>`,
    ],
    ["[x](&#x6a;avascript:alert(1))", "<p>[x](javascript:alert(1))</p>"],
    ["![a](nowhere) !", "<p>![a](nowhere) !</p>"],
    ["[x](https://a.example/?q=1)", `<p><a href="https://a.example/?q=1" ${LINK}>x</a></p>`],
    ['[x](https://a.example "title")', `<p><a href="https://a.example/" ${LINK}>x</a></p>`],
    ["[**x**](mailto:a@b.example)", `<p><a href="mailto:a@b.example" ${LINK}><strong>x</strong></a></p>`],
    ["<https://a.example/>", `<p><a href="https://a.example/" ${LINK}>https://a.example/</a></p>`],
    ["see https://a.example/b.", `<p>see <a href="https://a.example/b" ${LINK}>https://a.example/b</a>.</p>`],
    ["xhttps://a.example", "<p>xhttps://a.example</p>"],
    ["[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"],
    ["[x](JaVaScRiPt:alert(1))", "<p>[x](JaVaScRiPt:alert(1))</p>"],
    ["[x](\tjavascript:alert(1))", "<p>[x](\tjavascript:alert(1))</p>"],
    ["[x](data:text/html,1)", "<p>[x](data:text/html,1)</p>"],
    ["[x](vbscript:x)", "<p>[x](vbscript:x)</p>"],
    ["<javascript:alert(1)>", "<p>&lt;javascript:alert(1)&gt;</p>"],
    ["[x](/relative)", "<p>[x](/relative)</p>"],
    ['[x](https://a.example/"onclick="x)', `<p><a href="https://a.example/%22onclick=%22x" ${LINK}>x</a></p>`],
    ["[open](https://a.example", `<p>[open](<a href="https://a.example/" ${LINK}>https://a.example</a></p>`],
    ["[a\nb](https://a.example)", `<p>[a<br>b](<a href="https://a.example/" ${LINK}>https://a.example</a>)</p>`],
  ],
  "brackets in links": [
    [
      "See [1] and a[0], then [docs](https://a.example/x).",
      `<p>See [1] and a[0], then <a href="https://a.example/x" ${LINK}>docs</a>.</p>`,
    ],
    [
      "- [0] read [x](https://a.example)",
      `<ul dir="ltr"><li>[0] read <a href="https://a.example/" ${LINK}>x</a></li></ul>`,
    ],
    ["[a[0]](https://a.example)", `<p><a href="https://a.example/" ${LINK}>a[0]</a></p>`],
    ["[Mercury](https://a.example/M_(planet))", `<p><a href="https://a.example/M_(planet)" ${LINK}>Mercury</a></p>`],
    ["[x](https://a.example/a\\)b)", `<p><a href="https://a.example/a)b" ${LINK}>x</a></p>`],
    [
      "(https://a.example/M_(planet)).",
      `<p>(<a href="https://a.example/M_(planet)" ${LINK}>https://a.example/M_(planet)</a>).</p>`,
    ],
    ["[https://a.example](https://b.example/x)", `<p><a href="https://b.example/x" ${LINK}>https://a.example</a></p>`],
    [
      "[**<https://a.example> [b](https://c.example)**](https://b.example/x)",
      `<p><a href="https://b.example/x" ${LINK}><strong>&lt;https://a.example&gt; [b](https://c.example)</strong></a></p>`,
    ],
  ],
  "task lists": [
    [
      "- [ ] one\n- [x] **two**\n  - three",
      `<ul dir="ltr"><li class="task">${OPEN}one</li><li class="task">${DONE}<strong>two</strong><ul dir="ltr"><li>three</li></ul></li></ul>`,
    ],
    ["- [x](https://a.example)", `<ul dir="ltr"><li><a href="https://a.example/" ${LINK}>x</a></li></ul>`],
    ["- [ ]", "<ul><li>[ ]</li></ul>"],
    ["[x] no item", "<p>[x] no item</p>"],
  ],
  headings: [
    ["# One\n## Two", "<h3>One</h3><h4>Two</h4>"],
    ["###### Six", "<h6>Six</h6>"],
    ["## C#\n### Closed ##", "<h4>C#</h4><h5>Closed</h5>"],
    ["text\n# Title", "<p>text</p><h3>Title</h3>"],
    ["#hashtag", "<p>#hashtag</p>"],
  ],
  rules: [
    ["---", "<hr>"],
    ["* * *", "<hr>"],
    ["a\n\n___\nb", "<p>a</p><hr><p>b</p>"],
  ],
  quotes: [
    ["> quoted\nlazily", '<blockquote dir="ltr"><p>quoted<br>lazily</p></blockquote>'],
    ["> a\n>\n> b", '<blockquote dir="ltr"><p>a</p><p>b</p></blockquote>'],
    ["> > a", '<blockquote dir="ltr"><blockquote dir="ltr"><p>a</p></blockquote></blockquote>'],
    ["> - a\n> - b", '<blockquote dir="ltr"><ul dir="ltr"><li>a</li><li>b</li></ul></blockquote>'],
    ["> a\n# b", '<blockquote dir="ltr"><p>a</p></blockquote><h3>b</h3>'],
  ],
  lists: [
    ["- a\n- b", '<ul dir="ltr"><li>a</li><li>b</li></ul>'],
    ["- a\n\n- b", '<ul dir="ltr"><li>a</li><li>b</li></ul>'],
    ["1. a\n2. b", '<ol dir="ltr"><li>a</li><li>b</li></ol>'],
    ["3) a\n4) b", '<ol dir="ltr" start="3"><li>a</li><li>b</li></ol>'],
    ["1. one\n   - inner\n2. two", '<ol dir="ltr"><li>one<ul dir="ltr"><li>inner</li></ul></li><li>two</li></ol>'],
    [
      "- a\n  - b\n    - c\n- d",
      '<ul dir="ltr"><li>a<ul dir="ltr"><li>b<ul dir="ltr"><li>c</li></ul></li></ul></li><li>d</li></ul>',
    ],
    ["- a\n\n  second\n- b", '<ul dir="ltr"><li>a<p>second</p></li><li>b</li></ul>'],
    ["- a\nlazily\n- b", '<ul dir="ltr"><li>a<br>lazily</li><li>b</li></ul>'],
    ["- a\n1. b", '<ul dir="ltr"><li>a</li></ul><ol dir="ltr"><li>b</li></ol>'],
    ["- a\n\ntext", '<ul dir="ltr"><li>a</li></ul><p>text</p>'],
    ["- # a", '<ul dir="ltr"><li><h3>a</h3></li></ul>'],
    [
      "1. run\n   ```sh\n   ls\n   ```\n2. done",
      '<ol dir="ltr"><li>run<CodeBlock language="sh">ls</CodeBlock></li><li>done</li></ol>',
    ],
    [
      "10. run\n    ```\n    ls\n    ```",
      '<ol dir="ltr" start="10"><li>run<CodeBlock language="">ls</CodeBlock></li></ol>',
    ],
    [
      "1. run\n   ```py\n   import os\n\n\n   x\n\n    y\n   ```\n\n\n2. done\n\n\nend",
      '<ol dir="ltr"><li>run<CodeBlock language="py">import os\n\n\nx\n\n y</CodeBlock></li><li>done</li></ol><p>end</p>',
    ],
    [
      "- a\n  - b\n    ```py\n    x\n\n\n    y\n    ```\n- c",
      '<ul dir="ltr"><li>a<ul dir="ltr"><li>b<CodeBlock language="py">x\n\n\ny</CodeBlock></li></ul></li><li>c</li></ul>',
    ],
    ["- ```\n  x\n\n\n  y\n```\nend", '<ul><li><CodeBlock language="">x\n\n\ny</CodeBlock></li></ul><p>end</p>'],
    ["- ```\n  x\n\nend", '<ul><li><CodeBlock language="" isOpen="true">x</CodeBlock></li></ul><p>end</p>'],
    ["- a\n\n\n  second", '<ul dir="ltr"><li>a<p>second</p></li></ul>'],
    ["-", "<ul><li></li></ul>"],
    ["-a", "<p>-a</p>"],
  ],
  "fenced code": [
    ["```js\n<b>1</b>\n```\nend", '<CodeBlock language="js">&lt;b&gt;1&lt;/b&gt;</CodeBlock><p>end</p>'],
    ["~~~\na\n```\n~~~", '<CodeBlock language="">a\n```</CodeBlock>'],
    ["````\n```\n````", '<CodeBlock language="">```</CodeBlock>'],
    ["  ```\n  a\n    b\n  ```", '<CodeBlock language="">a\n  b</CodeBlock>'],
    ["```python title=x\na\n```", '<CodeBlock language="python">a</CodeBlock>'],
    ["```\n# a\n\n- b\n```", '<CodeBlock language=""># a\n\n- b</CodeBlock>'],
  ],
  tables: [
    [
      "| a | b |\n|---|--:|\n| 1 | 2 |",
      '<div class="scroll" dir="ltr" tabIndex="0"><table><thead><tr><th>a</th><th class="right">b</th></tr></thead>' +
        '<tbody><tr><td>1</td><td class="right">2</td></tr></tbody></table></div>',
    ],
    [
      "a | b\n:-: | -\n`x` | y \\| z\nend",
      '<div class="scroll" dir="ltr" tabIndex="0"><table><thead><tr><th class="centred">a</th><th>b</th></tr></thead>' +
        '<tbody><tr><td class="centred"><code>x</code></td><td>y | z</td></tr></tbody></table></div><p>end</p>',
    ],
    ["a | b\nno rule", "<p>a | b<br>no rule</p>"],
    ["Use a | b to pipe\n---\nNext", "<p>Use a | b to pipe</p><hr><p>Next</p>"],
    ["| a | b |\n|---|", "<p>| a | b |<br>|---|</p>"],
  ],
};

for (const [name, cases] of Object.entries(CASES)) {
  describe(name, () => {
    for (const [text, html] of cases) {
      test(JSON.stringify(text), () => assert.equal(toHtml(parseBlocks(text)), html));
    }
  });
}

describe("while an answer streams", () => {
  const answer =
    "Run it:\n\n```sh\nls -l *.txt\n```\n\n1. **one**\n   - `two`\n\n" +
    "| a | b |\n|---|---|\n| 1 | [x](https://a.example) |";

  test("every prefix can be parsed and shows only its own characters", () => {
    for (let end = 0; end <= answer.length; end += 1) {
      const prefix = answer.slice(0, end);
      const text = toHtml(parseBlocks(prefix)).replaceAll(/<[^>]*>/g, "");
      assert.ok(
        [...text].every((character) => prefix.includes(character)),
        text,
      );
    }
  });

  test("an open fence is already code", () => {
    assert.equal(toHtml(parseBlocks("```py")), '<CodeBlock language="py" isOpen="true"></CodeBlock>');
    assert.equal(toHtml(parseBlocks("```py\nx = *1*")), '<CodeBlock language="py" isOpen="true">x = *1*</CodeBlock>');
    assert.equal(toHtml(parseBlocks("```py\nx\n``")), '<CodeBlock language="py" isOpen="true">x\n``</CodeBlock>');
  });

  test("a table without rows is already a table", () => {
    const table = toHtml(parseBlocks("| a |\n|---|"));
    assert.match(table, /<th>a<\/th>.*<tbody><\/tbody>/);
  });
});

describe("hostile text", () => {
  const texts = {
    stars: "*".repeat(3000),
    brackets: "[".repeat(50_000),
    "open links": `${"[".repeat(50_000)}](x)`,
    ticks: `${"`".repeat(3000)}a`,
    quotes: "> ".repeat(500),
    lists: "- ".repeat(500),
    underscores: "_a".repeat(3000),
    bars: `${"|".repeat(2000)}\n|-|`,
    "unclosed marks": "*a _b ~~c ".repeat(9000),
    "links without targets": "[](".repeat(10_000),
    "nested links": `${"[".repeat(1000)}](`.repeat(20),
    "brackets after links": `https://a.example/${")".repeat(20_000)}`,
    "blank lines in a list": `- a${"\n".repeat(50_000)}b`,
    "spaces in a heading": `# a${" ".repeat(20_000)}b`,
    "spaces in a fence": `\`\`\`${" ".repeat(50_000)}\``,
    "spaces in a table": `a | b\n-${" ".repeat(50_000)}x`,
  };
  for (const [name, text] of Object.entries(texts)) {
    test(`${name}: parsed without exhausting time or stack`, { timeout: 20_000 }, () => {
      assert.ok(parseBlocks(text).length > 0);
    });
  }
});
