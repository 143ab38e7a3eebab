// OpenAI's client for Node against a gateway whose worker writes letters. Prints what it got, as JSON.
// The package lies beside the copy of this file that is run; the only argument is the gateway's URL.

import OpenAI, { toFile } from "openai";

const client = new OpenAI({ baseURL: process.argv[2], apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Once" }];
const got = {};

const models = await client.models.list();
got.models = models.data.map((model) => model.id);

const whole = await client.chat.completions.create({
  model: "model-free", messages, max_tokens: 5, seed: 3, n: 2, logprobs: true,
});
got.texts = whole.choices.map((choice) => choice.message.content);
got.tokens = whole.choices[0].logprobs.content.map((item) => item.token);
got.usage = whole.usage;

const stream = await client.chat.completions.create({
  model: "model-free", messages, max_tokens: 5, seed: 3, stream: true,
  stream_options: { include_usage: true },
});
got.streamed = "";
for await (const chunk of stream) {
  got.streamed += chunk.choices[0]?.delta.content ?? "";
  got.streamedUsage = chunk.usage ?? null;
}

const text = await client.completions.create({
  model: "model-free", prompt: "Once", max_tokens: 5, seed: 3, echo: true,
});
got.text = text.choices[0].text;

async function errorOf(call) {
  try {
    await call();
    return null;
  } catch (error) {
    return { kind: error.constructor.name, status: error.status, code: error.code, param: error.param };
  }
}

got.errors = [
  await errorOf(() => client.completions.create({ model: "model-free", prompt: "Hi", temperature: 9 })),
  await errorOf(() => client.completions.create({ model: "other", prompt: "Hi" })),
  await errorOf(() => client.models.retrieve("other")),
];

// Half a stream is enough: the client closes its connection, and the request is cancelled.
const endless = await client.completions.create({
  model: "model-free", prompt: "Hi", max_tokens: 3000, stream: true,
});
for await (const chunk of endless) {
  got.left = chunk.id;
  break;
}

// Nobody runs batches here; it is cancelled before it begins.
const lines = JSON.stringify({ custom_id: "1", method: "POST", url: "/v1/completions", body: { prompt: "Hi" } });
const file = await client.files.create({
  file: await toFile(Buffer.from(lines), "in.jsonl"), purpose: "batch",
});
got.file = [file.filename, await (await client.files.content(file.id)).text() === lines];
const batch = await client.batches.create({
  input_file_id: file.id, endpoint: "/v1/completions", completion_window: "24h",
});
got.batch = [batch.status, (await client.batches.cancel(batch.id)).status];
got.listed = [];
for await (const it of client.batches.list({ limit: 1 })) got.listed.push(it.id === batch.id);
got.deleted = (await client.files.delete(file.id)).deleted;
got.missing = await errorOf(() => client.files.retrieve(file.id));

console.log(JSON.stringify(got));
