// Vercel's AI SDK, with its provider for compatible servers and the one for OpenAI itself.

import assert from "node:assert/strict";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { embedMany, generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";
import * as trying from "./trying.mjs";
import { attempt, isTale, MODEL, same } from "./trying.mjs";

globalThis.AI_SDK_LOG_WARNINGS = false;
const settings = { baseURL: trying.URL, apiKey: trying.KEY };
const openai = createOpenAI(settings);
const compatible = createOpenAICompatible({ ...settings, name: "promptq", includeUsage: true });
const strict = createOpenAICompatible({
  ...{ ...settings, name: "promptq", supportsStructuredOutputs: true },
});
const ASKED = { system: trying.SYSTEM, prompt: trying.QUESTION, temperature: 0, maxRetries: 0 };
const SHORT = { ...ASKED, maxOutputTokens: trying.MAX_TOKENS };
const LONGER = { ...ASKED, maxOutputTokens: 200 };
const Tale = z.object({ hero: z.enum(["fox", "hare", "owl"]), friends: z.literal([1, 2, 3]) });
const paint = tool({ description: "Paint a hero.", inputSchema: Tale });

async function sameText(got) {
  const wanted = await trying.chat();
  same("text", await got.text, wanted.text);
  same("finishReason", await got.finishReason, wanted.finishReason);
  const usage = await got.usage;
  same("usage", [usage.inputTokens, usage.outputTokens], wanted.usage);
  return wanted.text;
}

async function tryProvider(name, model, schemaModel = model) {
  await attempt(`${name}: generateText`, async () =>
    sameText(await generateText({ ...SHORT, model: model(MODEL) })),
  );

  await attempt(`${name}: streamText`, async () => {
    let failure = null;
    const onError = ({ error }) => (failure = error);
    const stream = streamText({ ...SHORT, model: model(MODEL), onError });
    let pieces = 0;
    for await (const _ of stream.textStream) pieces += 1;
    if (failure) throw failure;
    assert(pieces > 2, `only ${pieces} pieces`);
    return sameText(stream);
  });

  await attempt(`${name}: forced tool call`, async () => {
    const toolChoice = { type: "tool", toolName: "paint" };
    const got = await generateText({ ...LONGER, model: model(MODEL), tools: { paint }, toolChoice });
    isTale(got.toolCalls[0].input);
    return JSON.stringify(got.toolCalls[0].input);
  });

  await attempt(`${name}: generateObject`, async () => {
    const got = await generateObject({ ...LONGER, model: schemaModel(MODEL), schema: Tale });
    isTale(got.object);
    return JSON.stringify(got.object);
  });

  await attempt(`${name}: error: unknown model`, () => {
    const call = () => generateText({ ...SHORT, model: model(trying.UNKNOWN) });
    return trying.fails(call, ...trying.UNKNOWN_SAYS);
  });

  await attempt(`${name}: error: prompt too long`, () => {
    const call = () => generateText({ ...SHORT, prompt: trying.LONG, model: model(MODEL) });
    return trying.fails(call, ...trying.LONG_SAYS);
  });
}

await tryProvider("compatible", (it) => compatible.chatModel(it), (it) => strict.chatModel(it));
await tryProvider("openai.chat", (it) => openai.chat(it));
await tryProvider("openai.responses", (it) => openai.responses(it));

for (const [name, provider] of Object.entries({ compatible, openai })) {
  await attempt(`${name}: completion`, async () => {
    const model = (provider.completionModel ?? provider.completion)(MODEL);
    const limits = { temperature: 0, maxOutputTokens: trying.MAX_TOKENS, maxRetries: 0 };
    const got = await generateText({ ...limits, model, prompt: trying.QUESTION });
    assert(got.text.length > 0);
    same("outputTokens", got.usage.outputTokens, trying.MAX_TOKENS);
    return got.text;
  });

  await attempt(`${name}: embedMany`, async () => {
    const model = (provider.embeddingModel ?? provider.textEmbeddingModel)(MODEL);
    const got = await embedMany({ model, values: [trying.QUESTION, "The rain"], maxRetries: 0 });
    assert(got.embeddings.length === 2 && got.embeddings[0].length > 1);
    return `${got.embeddings[0].length} dimensions`;
  });
}
