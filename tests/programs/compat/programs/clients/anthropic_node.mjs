// Anthropic's client for Node: messages, streams, tools, the tool runner, counting.

import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";
import { betaZodTool } from "@anthropic-ai/sdk/helpers/beta/zod";
import { z } from "zod";
import * as trying from "./trying.mjs";
import { attempt, isTale, MODEL, same } from "./trying.mjs";

const client = new Anthropic({ maxRetries: 0 });
const CALL = {
  ...{ model: MODEL, system: trying.SYSTEM, max_tokens: trying.MAX_TOKENS },
  messages: [{ role: "user", content: trying.QUESTION }],
};
const Tale = z.object({ hero: z.enum(["fox", "hare", "owl"]), friends: z.literal([1, 2, 3]) });
const TOOL = { name: "paint", description: "Paint a hero.", input_schema: trying.SCHEMA };

async function sameMessage(got) {
  const wanted = await trying.chat();
  same("text", got.content[0].text, wanted.text);
  same("stop_reason", got.stop_reason, "max_tokens");
  const cached = got.usage.cache_read_input_tokens; // counted apart
  same("usage", [got.usage.input_tokens + cached, got.usage.output_tokens], wanted.usage);
  return wanted.text;
}

await attempt("message", async () => sameMessage(await client.messages.create({ ...CALL, temperature: 0 })));

await attempt("streamed message", async () => {
  const stream = client.messages.stream({ ...CALL, temperature: 0 });
  let pieces = 0;
  stream.on("text", () => (pieces += 1));
  const got = await stream.finalMessage();
  assert(pieces > 2, `only ${pieces} pieces`);
  return sameMessage(got);
});

await attempt("forced tool call, and its result in a second turn", async () => {
  const fields = { ...CALL, max_tokens: 200, tools: [TOOL] };
  const got = await client.messages.create({ ...fields, tool_choice: { type: "tool", name: "paint" } });
  const [call] = got.content.filter((block) => block.type === "tool_use");
  isTale(call.input);
  const result = { type: "tool_result", tool_use_id: call.id, content: "painted" };
  const turns = [{ role: "assistant", content: got.content }, { role: "user", content: [result] }];
  const second = await client.messages.create({ ...fields, messages: [...CALL.messages, ...turns] });
  assert(second.content.length);
  return JSON.stringify(call.input);
});

for (const stream of [false, true]) {
  await attempt(`the tool runner${stream ? ", streamed" : ""}`, async () => {
    const painted = [];
    const run = (given) => painted.push(given) && "painted";
    const tool = betaZodTool({ ...{ name: "paint", description: "Paint a hero." }, inputSchema: Tale, run });
    const choice = { tool_choice: { type: "any" }, max_iterations: 2, stream };
    const fields = { ...CALL, max_tokens: 200, tools: [tool], ...choice };
    await client.beta.messages.toolRunner(fields).runUntilDone();
    same("calls", painted.length, 2);
    painted.forEach(isTale);
    return JSON.stringify(painted);
  });
}

await attempt("count of tokens", async () => {
  const { max_tokens: _, ...fields } = CALL;
  const count = await client.messages.countTokens(fields);
  same("tokens", count.input_tokens, (await trying.chat()).usage[0]);
  return String(count.input_tokens);
});

await attempt("error: unknown model", () => {
  const call = () => client.messages.create({ ...CALL, model: trying.UNKNOWN });
  return trying.fails(call, "NotFoundError", ...trying.UNKNOWN_SAYS);
});

await attempt("error: prompt too long, in a stream", () => {
  const messages = [{ role: "user", content: trying.LONG }];
  const call = () => client.messages.create({ ...CALL, messages, stream: true });
  return trying.fails(call, "BadRequestError", ...trying.LONG_SAYS);
});
