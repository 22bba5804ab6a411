// OpenAI's SDK for JavaScript.
import OpenAI from "openai";
import {
  ANSWER, CITY_SCHEMA, KEY, LAMP_REQUEST, LAMP_SCHEMA, MODEL, QUESTION, URL, WEATHER_ANSWER, WEATHER_QUESTION,
  WEATHER_RESULT, WRONG_KEY, check, equal, expect, expectLamp, rejected, run,
} from "./checks.mjs";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const conversation = [{ role: "user", content: QUESTION }];
const weatherConversation = [{ role: "user", content: WEATHER_QUESTION }];
const greedy = { model: MODEL, temperature: 0, max_tokens: 200 };
const weatherTool = {
  type: "function",
  function: { name: "get_weather", description: "Get the weather of a city", parameters: CITY_SCHEMA },
};
const chat = (messages, fields = {}) => client.chat.completions.create({ ...greedy, messages, ...fields });

check("models", async () => {
  const ids = [];
  for await (const model of client.models.list()) ids.push(model.id);
  expect(ids.includes(MODEL), ids);
  equal((await client.models.retrieve(MODEL)).id, MODEL);
});

check("chat", async () => {
  const answer = await chat(conversation);
  equal(answer.choices[0].message.content, ANSWER);
  equal(answer.choices[0].finish_reason, "stop");
  expect(answer._request_id.startsWith("req_"), answer._request_id);
});

check("chat, streamed", async () => {
  let text = "";
  let usage = null;
  for await (const chunk of await chat(conversation, { stream: true, stream_options: { include_usage: true } })) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  equal(text, ANSWER);
  expect(usage.completion_tokens > 0, usage);
});

check("tools", async () => {
  const answer = await chat(weatherConversation, { tools: [weatherTool] });
  const [call] = answer.choices[0].message.tool_calls;
  equal([call.function.name, JSON.parse(call.function.arguments)], ["get_weather", { city: "Paris" }]);
  equal(answer.choices[0].finish_reason, "tool_calls");
});

check("tools, run by the SDK, streamed", async () => {
  const run = { ...weatherTool.function, parse: JSON.parse, function: () => WEATHER_RESULT };
  const runner = client.chat.completions.runTools({
    ...greedy, messages: weatherConversation, stream: true, tools: [{ type: "function", function: run }],
  });
  equal(await runner.finalContent(), WEATHER_ANSWER);
});

check("tools, required", async () => {
  const answer = await chat(conversation, { tools: [weatherTool], tool_choice: "required" });
  const [call] = answer.choices[0].message.tool_calls;
  equal(Object.keys(JSON.parse(call.function.arguments)), ["city"]);
});

check("schema", async () => {
  const json_schema = { name: "lamp", strict: true, schema: LAMP_SCHEMA };
  const request = { response_format: { type: "json_schema", json_schema }, temperature: 1, seed: 1 };
  const answer = await chat([{ role: "user", content: LAMP_REQUEST }], request);
  expectLamp(answer.choices[0].message.content);
});

check("embeddings", async () => {
  const found = await client.embeddings.create({ model: MODEL, input: ["One.", "Two."] });
  const plain = await client.embeddings.create({ model: MODEL, input: ["One.", "Two."], encoding_format: "float" });
  equal(found.data[0].embedding.length, plain.data[0].embedding.length);
  expect(Math.abs(found.data[0].embedding[0] - plain.data[0].embedding[0]) < 1e-5, found.data[0].embedding[0]);
});

check("responses", async () => {
  const answer = await client.responses.create({ model: MODEL, input: QUESTION, temperature: 0 });
  equal([answer.status, answer.output_text], ["completed", ANSWER]);
});

check("responses, streamed", async () => {
  const stream = client.responses.stream({ model: MODEL, input: QUESTION, temperature: 0 });
  const numbers = [];
  for await (const event of stream) numbers.push(event.sequence_number);
  equal(numbers, [...numbers.keys()]);
  equal((await stream.finalResponse()).output_text, ANSWER);
});

check("responses, tools", async () => {
  const tools = [{ type: "function", ...weatherTool.function, strict: true }];
  const answer = await client.responses.create({ model: MODEL, input: WEATHER_QUESTION, tools, temperature: 0 });
  const call = answer.output.find((item) => item.type === "function_call");
  equal([call.name, JSON.parse(call.arguments)], ["get_weather", { city: "Paris" }]);
});

check("errors", async () => {
  const stranger = client.withOptions({ apiKey: WRONG_KEY });
  await rejected(OpenAI.AuthenticationError, stranger.chat.completions.create({ ...greedy, messages: conversation }));
  const unknown = await rejected(OpenAI.NotFoundError, chat(conversation, { model: "no/such-model" }));
  equal(unknown.code, "model_not_found");
  const wrong = await rejected(OpenAI.BadRequestError, chat(conversation, { temperature: 9 }));
  equal(wrong.param, "temperature");
});

check("cancelling a stream", async () => {
  const stream = await chat(conversation, { stream: true, max_tokens: 20_000, ignore_eos: true });
  for await (const _ of stream) break;
  expect(stream.controller.signal.aborted, "a stream that continues");
  equal((await chat(conversation)).choices[0].message.content, ANSWER);
});

await run();
