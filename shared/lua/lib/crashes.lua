-- uses: keys, numbers, server, pictures, requests, pending, ending
-- Consequences of a worker's crash for the requests that it held.

local SHARED_CRASHES = 2    -- after this number of crashes a request is a suspect and runs alone
local MAX_BACKOFF_MS = 60000

-- How long a request waits after `num` crashes (ms). After the first it does not wait.
local function backoff(num)
  if num < 2 then return 0 end
  return math.min(server.number('crash_backoff_ms', 1000) * 2 ^ math.min(num - 2, 20), MAX_BACKOFF_MS)
end

local function bury(id, num)
  ending.finish_bare(id, 'error', 'dead_letter', string.format(
    'the request is not tried again after %d crashes of workers, the last of them while it ran alone',
    num))
  redis.call('HSET', keys.request(id), 'state', 'dead')
  -- A hash that is not listed would never be purged, so it keeps its expiry.
  local is_listed = type(redis.pcall('ZADD', keys.dead, server.now_text, id)) == 'number'
  if is_listed then
    redis.call('PERSIST', keys.request(id))
    pictures.keep(id, (requests.read(id, 'pictures') or {}).pictures)
  end
end

-- Whether to extend a lease that ran out, instead of making the request a dead letter. This is so if the
-- worker ran the request alone and has a recent heartbeat: it may be slow, not dead. The lease then lasts
-- until the worker counts as gone. It is extended once per attempt, because a live worker may have lost the
-- request.
function crashes.may_live(id, max_crashes)
  local fields = requests.read(id, 'crashes', 'alone', 'worker') or {}
  if fields.alone ~= '1' or numbers.whole(fields.crashes, 0) + 1 < max_crashes then return false end
  local gone_at = server.score_in(keys.prefix .. 'workers', fields.worker or '') or 0
  if gone_at <= server.now then return false end
  redis.call('ZADD', keys.leases, numbers.exact(gone_at), id)
  redis.call('HSET', keys.request(id), 'alone', 2)
  return true
end

-- Count a crash of the worker that held the request. After two crashes the request is a suspect and runs
-- alone, because only a request that ran alone is known to have caused a crash. Returns the new state.
function crashes.count(id, score, max_crashes)
  local fields = requests.read(id, 'crashes', 'alone') or {}
  local num, key = numbers.whole(fields.crashes, 0) + 1, keys.request(id)
  redis.call('HSET', key, 'crashes', num)
  if fields.alone and num >= max_crashes then
    pending.note_end_of_attempt(id, 'crashed alone')
    bury(id, num)
    return 'dead'
  end
  if num >= math.max(1, math.min(SHARED_CRASHES, max_crashes - 1)) then
    redis.call('HSET', key, 'suspect', 1)
  end
  pending.put_back(id, score, fields.alone and 'crashed alone' or 'crashed', backoff(num))
  return 'waiting'
end
