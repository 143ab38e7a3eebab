// What the scripts for Node share; trying.py is the same for Python, and says more about it.

import assert from "node:assert/strict";
import { appendFileSync } from "node:fs";
import { inspect } from "node:util";

const environment = process.env;
export const URL = environment.OPENAI_BASE_URL;
export const KEY = environment.OPENAI_API_KEY;
export const MODEL = environment.COMPAT_MODEL;
export const ALIAS = "gpt-4o";

export const SYSTEM = "You tell stories.";
export const QUESTION = "Tell me a story about a fox and a lantern.";
export const MESSAGES = [
  { role: "system", content: SYSTEM },
  { role: "user", content: QUESTION },
];
export const PROMPT = "Once upon a time, there was a fox";
export const MAX_TOKENS = 24;
export const LONG = "once ".repeat(20_000);
export const LONG_SAYS = ["characters"];
export const UNKNOWN = "no-such-model";
export const UNKNOWN_SAYS = [UNKNOWN, MODEL];

export const SCHEMA = {
  type: "object",
  properties: {
    hero: { type: "string", enum: ["fox", "hare", "owl"] },
    friends: { type: "integer", enum: [1, 2, 3] },
  },
  required: ["hero", "friends"],
  additionalProperties: false,
};
export const TOOL = {
  type: "function",
  function: { name: "paint", description: "Paint a hero.", parameters: SCHEMA },
};
export const TOOL_CHOICE = { type: "function", function: { name: "paint" } };

export function same(what, got, wanted) {
  assert.deepEqual(got, wanted, `${what}: ${inspect(got)} instead of ${inspect(wanted)}`);
}

export function isTale(got) {
  const value = typeof got === "string" ? JSON.parse(got) : got;
  same("fields", Object.keys(value).sort(), ["friends", "hero"]);
  for (const [name, schema] of Object.entries(SCHEMA.properties)) {
    assert(schema.enum.includes(value[name]), `${name}: ${value[name]} is not in the schema`);
  }
}

export async function fails(call, ...words) {
  let got;
  try {
    got = await call();
  } catch (error) {
    const told = `${error.constructor.name}: ${error.message} ${error.responseBody ?? ""}`;
    for (const word of words) {
      assert(told.includes(word), `the error does not say ${inspect(word)}: ${told}`);
    }
    return told;
  }
  assert.fail(`no error was raised: ${inspect(got)}`);
}

async function plain(path, body) {
  const headers = { Authorization: `Bearer ${KEY}`, "Content-Type": "application/json" };
  const options = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await (await fetch(environment.COMPAT_GATEWAY + path, options)).json();
  const [choice] = answer.choices;
  return {
    text: choice.message?.content ?? choice.text,
    finishReason: choice.finish_reason,
    usage: [answer.usage.prompt_tokens, answer.usage.completion_tokens],
  };
}

export const chat = (messages = MESSAGES) =>
  plain("/v1/chat/completions", { messages, max_tokens: MAX_TOKENS, temperature: 0 });

export const completion = (prompt = PROMPT) =>
  plain("/v1/completions", { prompt, max_tokens: MAX_TOKENS, temperature: 0 });

export async function attempt(tried, call) {
  const began = Date.now() / 1000;
  let got = null;
  let why = "";
  try {
    got = await call();
  } catch (error) {
    const name = error instanceof assert.AssertionError ? "" : `${error.constructor.name}: `;
    why = `${name}${error.message}`.replace(/\s+/g, " ") || "it failed without a word";
  }
  const told = { tried, passed: !why, got: typeof got === "string" ? got : inspect(got), why };
  const times = { began, ended: Date.now() / 1000 };
  appendFileSync(environment.COMPAT_TOLD, `${JSON.stringify({ ...told, ...times })}\n`);
}
