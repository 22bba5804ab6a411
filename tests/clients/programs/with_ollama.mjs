// Ollama's client for JavaScript.
import { Ollama } from "ollama";
import {
  ANSWER, CITY_SCHEMA, KEY, LAMP_REQUEST, LAMP_SCHEMA, MODEL, QUESTION, URL, WEATHER_ANSWER, WEATHER_QUESTION,
  WEATHER_RESULT, WRONG_KEY, check, equal, expect, expectLamp, rejected, run,
} from "./checks.mjs";

const clientWith = (key) => new Ollama({ host: URL, headers: { Authorization: `Bearer ${key}` } });
const client = clientWith(KEY);
const options = { temperature: 0, num_predict: 200 };
const conversation = [{ role: "user", content: QUESTION }];
const weatherConversation = [{ role: "user", content: WEATHER_QUESTION }];
const weatherTool = {
  type: "function",
  function: { name: "get_weather", description: "Get the weather of a city", parameters: CITY_SCHEMA },
};
const chat = (messages, fields = {}) => client.chat({ model: MODEL, messages, options, ...fields });

check("models", async () => {
  const { models } = await client.list();
  expect(models.some((model) => model.model === MODEL), models);
  expect((await client.show({ model: MODEL })).capabilities.includes("completion"), "no capability");
});

check("chat", async () => {
  const answer = await chat(conversation);
  equal([answer.message.content, answer.done, answer.done_reason], [ANSWER, true, "stop"]);
});

check("chat, streamed", async () => {
  const pieces = [];
  for await (const piece of await chat(conversation, { stream: true })) pieces.push(piece);
  equal(pieces.map((piece) => piece.message.content).join(""), ANSWER);
  equal(pieces.map((piece) => piece.done).indexOf(true), pieces.length - 1);
});

check("thinking", async () => {
  const answer = await chat(conversation, { think: true });
  expect(answer.message.thinking, answer);
  equal(answer.message.content, ANSWER);
});

check("tools", async () => {
  const first = await chat(weatherConversation, { tools: [weatherTool] });
  const [call] = first.message.tool_calls;
  equal([call.function.name, call.function.arguments], ["get_weather", { city: "Paris" }]);
  const result = { role: "tool", tool_name: "get_weather", content: WEATHER_RESULT };
  const last = await chat([...weatherConversation, first.message, result], { tools: [weatherTool] });
  equal(last.message.content, WEATHER_ANSWER);
});

check("schema", async () => {
  const request = [{ role: "user", content: LAMP_REQUEST }];
  const answer = await chat(request, { format: LAMP_SCHEMA, options: { ...options, temperature: 1, seed: 1 } });
  expectLamp(answer.message.content);
});

check("generate", async () => {
  equal((await client.generate({ model: MODEL, prompt: QUESTION, options })).response, ANSWER);
});

check("embeddings", async () => {
  const { embeddings } = await client.embed({ model: MODEL, input: ["One.", "Two."] });
  equal([embeddings.length, embeddings[0].length], [2, embeddings[1].length]);
});

check("errors", async () => {
  const wrongKey = await rejected(Error, clientWith(WRONG_KEY).chat({ model: MODEL, messages: conversation }));
  equal(wrongKey.status_code, 401);
  const unknown = await rejected(Error, chat(conversation, { model: "no/such-model" }));
  equal(unknown.status_code, 404);
  expect(unknown.error.includes("no/such-model"), unknown.error);
  const wrong = await rejected(Error, chat(conversation, { options: { temperature: 9 } }));
  equal(wrong.status_code, 400);
  expect(wrong.error.includes("temperature"), wrong.error);
});

check("cancelling a stream", async () => {
  const long = [{ role: "user", content: `Repeat this: ${"one two three four ".repeat(40)}` }];
  const stream = await client.chat({ model: MODEL, messages: long, stream: true });
  const seen = rejected(Error, (async () => {
    for await (const _ of stream) stream.abort();
  })());
  equal((await seen).name, "AbortError");
  equal((await chat(conversation)).message.content, ANSWER);
});

await run();
