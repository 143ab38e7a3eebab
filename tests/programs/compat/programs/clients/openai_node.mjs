// OpenAI's client for Node: chats, completions, responses, embeddings, errors.

import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import * as trying from "./trying.mjs";
import { attempt, isTale, MODEL, same } from "./trying.mjs";

const client = new OpenAI({ maxRetries: 0 });
const CHAT = { model: MODEL, messages: trying.MESSAGES, temperature: 0, max_tokens: trying.MAX_TOKENS };
const RESPONSE = {
  ...{ model: MODEL, instructions: trying.SYSTEM, input: trying.QUESTION, store: false },
  ...{ temperature: 0, max_output_tokens: trying.MAX_TOKENS },
};
const Tale = z.object({ hero: z.enum(["fox", "hare", "owl"]), friends: z.literal([1, 2, 3]) });

async function sameChat(got) {
  const wanted = await trying.chat();
  same("text", got.choices[0].message.content, wanted.text);
  same("finish_reason", got.choices[0].finish_reason, wanted.finishReason);
  same("usage", [got.usage.prompt_tokens, got.usage.completion_tokens], wanted.usage);
  return wanted.text;
}

await attempt("chat", async () => sameChat(await client.chat.completions.create(CHAT)));

await attempt("streamed chat with usage", async () => {
  const options = { stream_options: { include_usage: true } };
  const stream = client.chat.completions.stream({ ...CHAT, ...options });
  let chunks = 0;
  for await (const _ of stream) chunks += 1;
  assert(chunks > 3, `only ${chunks} chunks`);
  return sameChat(await stream.finalChatCompletion());
});

await attempt("forced tool call", async () => {
  const fields = { ...CHAT, max_tokens: 200, tools: [trying.TOOL] };
  const got = await client.chat.completions.create({ ...fields, tool_choice: trying.TOOL_CHOICE });
  const [call] = got.choices[0].message.tool_calls;
  same("name", call.function.name, "paint");
  isTale(call.function.arguments);
  return call.function.arguments;
});

await attempt("runTools calls a function and sends its result", async () => {
  const painted = [];
  const paint = (given) => painted.push(given) && "painted";
  const tool = { ...trying.TOOL, function: { ...trying.TOOL.function, parse: JSON.parse, function: paint } };
  const asked = { ...CHAT, max_tokens: 200, tools: [tool], tool_choice: trying.TOOL_CHOICE };
  await client.chat.completions.runTools(asked).done();
  isTale(painted[0]);
  return JSON.stringify(painted[0]);
});

await attempt("structured output of a class", async () => {
  const form = { response_format: zodResponseFormat(Tale, "tale") };
  const got = await client.chat.completions.parse({ ...CHAT, max_tokens: 200, ...form });
  isTale(got.choices[0].message.parsed);
  return got.choices[0].message.content;
});

await attempt("completion", async () => {
  const fields = { model: MODEL, prompt: trying.PROMPT, temperature: 0, max_tokens: trying.MAX_TOKENS };
  const wanted = await trying.completion();
  same("text", (await client.completions.create(fields)).choices[0].text, wanted.text);
  let text = "";
  const stream = await client.completions.create({ ...fields, stream: true });
  for await (const chunk of stream) text += chunk.choices[0].text;
  same("streamed text", text, wanted.text);
  return text;
});

await attempt("embeddings", async () => {
  const input = [trying.QUESTION, "The rain in the valley"];
  const got = await client.embeddings.create({ model: MODEL, input });
  const [one, other] = got.data.map((it) => it.embedding);
  assert(one.length > 1 && one.every(Number.isFinite) && String(one) !== String(other));
  return `${one.length} dimensions`;
});

async function sameResponse(got) {
  const wanted = await trying.chat();
  same("text", got.output_text, wanted.text);
  same("usage", [got.usage.input_tokens, got.usage.output_tokens], wanted.usage);
  return wanted.text;
}

await attempt("response", async () => sameResponse(await client.responses.create(RESPONSE)));

await attempt("streamed response", async () => {
  const stream = client.responses.stream(RESPONSE);
  let deltas = 0;
  stream.on("response.output_text.delta", () => (deltas += 1));
  const got = await stream.finalResponse();
  assert(deltas > 2, `only ${deltas} deltas`);
  return sameResponse(got);
});

await attempt("error: unknown model", () => {
  const call = () => client.chat.completions.create({ ...CHAT, model: trying.UNKNOWN });
  return trying.fails(call, "NotFoundError", ...trying.UNKNOWN_SAYS);
});

await attempt("error: prompt too long, in a stream", () => {
  const messages = [{ role: "user", content: trying.LONG }];
  const call = () => client.chat.completions.create({ ...CHAT, messages, stream: true });
  return trying.fails(call, "BadRequestError", ...trying.LONG_SAYS);
});
