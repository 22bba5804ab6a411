// Vercel's AI SDK, through its OpenAI-compatible and its Anthropic provider.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, embedMany, generateText, isStepCount, jsonSchema, streamText, tool } from "ai";
import {
  ANSWER, CITY_SCHEMA, KEY, LAMP_REQUEST, LAMP_SCHEMA, MODEL, QUESTION, URL, WEATHER_ANSWER, WEATHER_QUESTION,
  WEATHER_RESULT, WRONG_KEY, check, equal, expect, expectLamp, rejected, run,
} from "./checks.mjs";

const openaiWith = (apiKey) =>
  createOpenAICompatible({
    name: "mlx-ring", baseURL: `${URL}/v1`, apiKey, includeUsage: true, supportsStructuredOutputs: true,
  });
const anthropicWith = (apiKey) => createAnthropic({ baseURL: `${URL}/v1`, apiKey });
const greedy = { temperature: 0, maxOutputTokens: 200, maxRetries: 0 };
const weather = tool({
  description: "Get the weather of a city",
  inputSchema: jsonSchema(CITY_SCHEMA),
  execute: async () => JSON.parse(WEATHER_RESULT),
});
const tools = { get_weather: weather };

const chats = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const answer = await generateText({ ...greedy, model, prompt: QUESTION });
  equal([answer.text, answer.finishReason], [ANSWER, "stop"]);
  expect(answer.usage.outputTokens > 0 && answer.usage.inputTokens > 0, answer.usage);
};

const streams = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const answer = streamText({ ...greedy, model, prompt: QUESTION });
  let text = "";
  for await (const piece of answer.textStream) text += piece;
  equal([text, await answer.finishReason], [ANSWER, "stop"]);
  expect((await answer.usage).outputTokens > 0, await answer.usage);
};

const runsTools = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const answer = await generateText({
    ...greedy, model, prompt: WEATHER_QUESTION, tools, stopWhen: isStepCount(3),
  });
  const [call] = answer.steps[0].toolCalls;
  equal([call.toolName, call.input, answer.steps[0].finishReason], ["get_weather", { city: "Paris" }, "tool-calls"]);
  equal(answer.text, WEATHER_ANSWER);
};

const streamsTools = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const answer = streamText({ ...greedy, model, prompt: WEATHER_QUESTION, tools, stopWhen: isStepCount(3) });
  let text = "";
  for await (const piece of answer.textStream) text += piece;
  const [first] = await answer.steps;
  equal([first.toolCalls[0].input, text], [{ city: "Paris" }, WEATHER_ANSWER]);
};

const callsTool = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const { toolCalls } = await generateText({ ...greedy, model, prompt: QUESTION, tools, toolChoice: "required" });
  equal(Object.keys(toolCalls[0].input), ["city"]);
};

const holdsToSchema = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const output = Output.object({ schema: jsonSchema(LAMP_SCHEMA) });
  const answer = await generateText({ ...greedy, temperature: 1, seed: 1, model, prompt: LAMP_REQUEST, output });
  expectLamp(JSON.stringify(answer.output));
};

const errs = async (modelWith) => {
  const statusOf = async (key, name, fields = {}) => {
    const request = generateText({ ...greedy, model: modelWith(key, name), prompt: QUESTION, ...fields });
    return (await rejected(APICallError, request)).statusCode;
  };
  equal(await statusOf(WRONG_KEY, MODEL), 401);
  equal(await statusOf(KEY, "no/such-model"), 404);
  equal(await statusOf(KEY, MODEL, { topP: 9 }), 400);
};

const cancels = async (modelWith) => {
  const model = modelWith(KEY, MODEL);
  const controller = new AbortController();
  const long = `Repeat this: ${"one two three four ".repeat(40)}`;
  const { textStream } = streamText({ ...greedy, model, prompt: long, abortSignal: controller.signal });
  for await (const _ of textStream) break;
  controller.abort();
  equal((await generateText({ ...greedy, model, prompt: QUESTION })).text, ANSWER);
};

const openai = (key, name) => openaiWith(key)(name);
const anthropic = (key, name) => anthropicWith(key)(name);

check("chat", () => chats(openai));
check("chat, streamed", () => streams(openai));
check("tools, run by the SDK", () => runsTools(openai));
check("tools, streamed", () => streamsTools(openai));
check("tools, required", () => callsTool(openai));
check("schema", () => holdsToSchema(openai));
check("errors", () => errs(openai));
check("cancelling a stream", () => cancels(openai));

check("embeddings", async () => {
  const model = openaiWith(KEY).embeddingModel(MODEL);
  const { embeddings } = await embedMany({ model, values: ["One.", "Two."], maxRetries: 0 });
  equal([embeddings.length, embeddings[0].length], [2, embeddings[1].length]);
});

check("as Anthropic, chat", () => chats(anthropic));
check("as Anthropic, chat, streamed", () => streams(anthropic));
check("as Anthropic, tools, run by the SDK", () => runsTools(anthropic));
check("as Anthropic, tools, streamed", () => streamsTools(anthropic));
check("as Anthropic, tools, required", () => callsTool(anthropic));
check("as Anthropic, schema", () => holdsToSchema(anthropic));
check("as Anthropic, errors", () => errs(anthropic));
check("as Anthropic, cancelling a stream", () => cancels(anthropic));

await run();
