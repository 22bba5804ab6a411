// Anthropic's SDK for JavaScript.
import Anthropic from "@anthropic-ai/sdk";
import {
  ANSWER, CITY_SCHEMA, KEY, LAMP_REQUEST, LAMP_SCHEMA, MODEL, QUESTION, URL, WEATHER_ANSWER, WEATHER_QUESTION,
  WEATHER_RESULT, WRONG_KEY, check, equal, expect, expectLamp, rejected, run,
} from "./checks.mjs";

const client = new Anthropic({ baseURL: URL, apiKey: KEY, maxRetries: 0, timeout: 60_000 });
const conversation = [{ role: "user", content: QUESTION }];
const weatherConversation = [{ role: "user", content: WEATHER_QUESTION }];
const limited = { model: MODEL, max_tokens: 200 };
const tools = [{ name: "get_weather", description: "Get the weather of a city", input_schema: CITY_SCHEMA }];
const message = (messages, fields = {}) => client.messages.create({ ...limited, messages, ...fields });

check("messages", async () => {
  const answer = await message(conversation, { system: "Be brief." });
  equal(answer.content.map((block) => block.text), [ANSWER]);
  equal(answer.stop_reason, "end_turn");
});

check("messages, streamed", async () => {
  let text = "";
  const stream = client.messages.stream({ ...limited, messages: conversation }).on("text", (piece) => (text += piece));
  const last = await stream.finalMessage();
  equal([text, last.content[0].text, last.stop_reason], [ANSWER, ANSWER, "end_turn"]);
});

check("tools", async () => {
  const answer = await message(weatherConversation, { tools });
  const call = answer.content.find((block) => block.type === "tool_use");
  equal([call.name, call.input, answer.stop_reason], ["get_weather", { city: "Paris" }, "tool_use"]);
  const result = { type: "tool_result", tool_use_id: call.id, content: WEATHER_RESULT };
  const turns = [{ role: "assistant", content: answer.content }, { role: "user", content: [result] }];
  equal((await message([...weatherConversation, ...turns], { tools })).content[0].text, WEATHER_ANSWER);
});

check("tools, streamed", async () => {
  const last = await client.messages.stream({ ...limited, messages: weatherConversation, tools }).finalMessage();
  const call = last.content.find((block) => block.type === "tool_use");
  equal([call.name, call.input, last.stop_reason], ["get_weather", { city: "Paris" }, "tool_use"]);
});

check("tools, required", async () => {
  const answer = await message(conversation, { tools, tool_choice: { type: "any" } });
  equal(Object.keys(answer.content.find((block) => block.type === "tool_use").input), ["city"]);
});

check("thinking", async () => {
  const thinking = { type: "enabled", budget_tokens: 1024 };
  const answer = await message(conversation, { max_tokens: 2000, thinking });
  equal(answer.content.map((block) => block.type), ["thinking", "text"]);
});

check("schema", async () => {
  const output_config = { format: { type: "json_schema", schema: LAMP_SCHEMA } };
  const answer = await message([{ role: "user", content: LAMP_REQUEST }], { output_config });
  expectLamp(answer.content[0].text);
});

check("counting tokens", async () => {
  const count = await client.messages.countTokens({ model: MODEL, messages: conversation });
  expect(count.input_tokens > 0, count);
});

check("errors", async () => {
  const stranger = client.withOptions({ apiKey: WRONG_KEY });
  const wrongKey = await rejected(Anthropic.AuthenticationError, stranger.messages.create({ ...limited, messages: conversation }));
  equal(wrongKey.error.error.type, "authentication_error");
  await rejected(Anthropic.NotFoundError, message(conversation, { model: "no/such-model" }));
  await rejected(Anthropic.BadRequestError, message(conversation, { max_tokens: -1 }));
});

check("cancelling a stream", async () => {
  const long = [{ role: "user", content: `Repeat this: ${"one two three four ".repeat(40)}` }];
  for await (const _ of await message(long, { stream: true, max_tokens: 20_000 })) break;
  equal((await message(conversation)).content[0].text, ANSWER);
});

await run();
