// BullMQ's no-op jobs: `node bullmq.mjs worker|producer PORT COUNT`. Found in the peers' folder.
import { createRequire } from "node:module";
import path from "node:path";

const [role, port, count] = process.argv.slice(2);
const require = createRequire(path.join(process.env.BULLMQ_FOLDER, "package.json"));
const { Queue, Worker } = require("bullmq");
const password = process.env.BULLMQ_PASSWORD;
const connection = { host: "127.0.0.1", port: Number(port), password, maxRetriesPerRequest: null };
const BULK = 500;

if (role === "worker") {
  let finished = 0;
  const worker = new Worker("bench", async () => null, { connection, concurrency: 100 });
  worker.on("completed", () => {
    finished += 1;
    if (finished === Number(count)) console.log("finished");
  });
  await worker.waitUntilReady();
  console.log("ready");
} else {
  const queue = new Queue("bench", { connection });
  await queue.waitUntilReady();
  console.log("ready");
  await new Promise((resolve) => process.stdin.once("data", resolve));
  for (let first = 0; first < Number(count); first += BULK) {
    const size = Math.min(BULK, Number(count) - first);
    await queue.addBulk(Array.from({ length: size }, () => ({ name: "no-op", data: {} })));
  }
  await queue.close();
  process.exit(0);
}
