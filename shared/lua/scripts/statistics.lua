-- uses: keys, numbers, server, arguments, priority_counts, work
-- Add to the queue's statistics. The stream `statistics` gets one entry for each 5 s, however many call.
-- ARGV by name, or by position: 1 generated_tokens   2 prompt_tokens that were computed   3 finished requests
--       4 ttft: times to first token (ms), with spaces between   5 queue: times in the queue (ms), likewise;
--       all of them since the caller's last call
-- Reply how many entries were written: 0 or 1
-- The first call of each 5 s counts what waits and runs. The hash `statistics:open` sums up the rest until the
-- first call after those 5 s, which writes the entry.

local BUCKET_MS, MAX_ENTRIES, KEPT_MS = work.SAMPLE_MS, 720, 3600000
local BIN_WIDTH = math.log(1.05) -- times are counted in bins 5% wide, so that workers' counts can be added
local stream, open = keys.prefix .. 'statistics', keys.prefix .. 'statistics:open'
local SUMS = {'generated_tokens', 'prompt_tokens', 'finished'}

local function read_open()
  local flat, fields = redis.pcall('HGETALL', open), {}
  for at = 1, flat.err and 0 or #flat, 2 do fields[flat[at]] = flat[at + 1] end
  return fields
end

-- The percentiles `shares` of the times of a kind, from their bins, or '' if there are no times.
local function percentiles(fields, kind, shares)
  local bins, total, found = {}, 0, {}
  for name, num in pairs(fields) do
    local bin = string.match(name, '^' .. kind .. ':(%d+)$')
    if bin then
      num = numbers.whole(num, 0)
      bins[#bins + 1] = {tonumber(bin), num}
      total = total + num
    end
  end
  table.sort(bins, function(one, other) return one[1] < other[1] end)
  for nth, share in ipairs(shares) do
    local left, at = math.max(1, math.ceil(total * share)), 0
    while at < #bins and left > 0 do
      at = at + 1
      left = left - bins[at][2]
    end
    found[nth] = at > 0 and string.format('%.1f', math.exp((bins[at][1] + 0.5) * BIN_WIDTH)) or ''
  end
  return unpack(found)
end

-- Write the entry of the sample in `fields`. `after` has the counts at its end. Returns how many were written.
local function close(fields, after)
  local seconds = BUCKET_MS / 1000
  -- Redis adds no entry after one in the future, which a stranger may have written.
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
  if last and tonumber(string.match(last[1], '^%d+')) > server.now + KEPT_MS then redis.call('DEL', stream) end
  local ttft_p50, ttft_p95 = percentiles(fields, 'ttft', {0.5, 0.95})
  local queue_p50, queue_p95 = percentiles(fields, 'queue', {0.5, 0.95})
  local added = redis.pcall('XADD', stream, 'MAXLEN', MAX_ENTRIES, fields.bucket .. '-0',
    'waiting', fields.waiting, 'priorities', fields.priorities, 'delayed', fields.delayed,
    'active', fields.active, 'running', fields.running, 'workers', fields.workers,
    'tokens_per_second', string.format('%.1f', (tonumber(fields.generated_tokens) or 0) / seconds),
    'prompt_tokens_per_second', string.format('%.1f', (tonumber(fields.prompt_tokens) or 0) / seconds),
    'finished', fields.finished or '0', 'ttft_p50_ms', ttft_p50, 'ttft_p95_ms', ttft_p95,
    'queue_p50_ms', queue_p50, 'queue_p95_ms', queue_p95, 'worker_tokens_per_second',
    string.format('%.1f', work.tokens_of_worker_after(fields, after.claiming, after.waiting > 0)))
  return type(added) == 'string' and 1 or 0 -- 0: it was written before the server's clock went back
end

-- The current numbers of requests and workers.
local function counted()
  local total, counts = priority_counts.count()
  local parts, now = {}, work.count_workers()
  for priority, num in pairs(counts) do
    parts[#parts + 1] = string.format('"%d":%d', priority, num)
  end
  now.waiting, now.priorities = total, '{' .. table.concat(parts, ',') .. '}'
  return now
end

local function begin(bucket, now)
  redis.call('DEL', open)
  redis.call('HSET', open, 'bucket', bucket, 'waiting', now.waiting, 'priorities', now.priorities,
    'delayed', server.size(keys.delayed), 'active', server.size(keys.leases),
    'running', now.running, 'workers', now.alive, 'claiming', now.claiming)
end

local function add_times(kind, times)
  local bins = {}
  for ms in string.gmatch(times or '', '%d+') do
    local bin = math.floor(math.log(math.max(1, tonumber(ms))) / BIN_WIDTH)
    bins[bin] = (bins[bin] or 0) + 1
  end
  for bin, num in pairs(bins) do redis.pcall('HINCRBY', open, kind .. ':' .. bin, num) end
end

local args = arguments.read({'generated_tokens', 'prompt_tokens', 'finished', 'ttft', 'queue'}, 0)
server.write_needs_no_memory()
local bucket, written = numbers.exact(server.now - server.now % BUCKET_MS), 0
local fields = read_open()
server.reset_if_not('hash', open)
server.reset_if_not('stream', stream)
if fields.bucket ~= bucket then
  local now = counted()
  local begun = numbers.whole(fields.bucket)
  if begun and begun < server.now + KEPT_MS and fields.workers then written = close(fields, now) end
  begin(bucket, now)
end
for _, name in ipairs(SUMS) do
  local num = numbers.whole(args[name], 0)
  if num > 0 then redis.pcall('HINCRBY', open, name, numbers.exact(num)) end
end
for _, kind in ipairs({'ttft', 'queue'}) do add_times(kind, args[kind]) end
redis.pcall('PEXPIRE', open, KEPT_MS)
redis.pcall('PEXPIRE', stream, KEPT_MS)
return written
