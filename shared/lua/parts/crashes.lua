-- What a crash means to those who were aboard.

local SHARED_CRASHES = 2    -- then it is a suspect and runs alone
local MAX_BACKOFF_MS = 60000

-- How long a request waits after so many crashes: not at all after the first.
local function backoff(crashes)
  if crashes < 2 then return 0 end
  return math.min(whole(config('crash_backoff_ms'), 1000) * 2 ^ math.min(crashes - 2, 20), MAX_BACKOFF_MS)
end

local function bury(id, crashes)
  finish_bare(id, 'error', 'dead_letter', string.format(
    'the request was aboard at %d crashes of workers, the last time alone, and is not tried again',
    crashes))
  redis.call('HSET', request_key(id), 'state', 'dead')
  -- What is listed nowhere would never be purged.
  local is_listed = type(redis.pcall('ZADD', prefix .. 'dead', now_text, id)) == 'number'
  if is_listed then redis.call('PERSIST', request_key(id)) end
end

-- Delete a dead letter and all that is kept of it; false if it is none.
local function purge(id)
  if redis.call('ZREM', prefix .. 'dead', id) == 0 then return false end
  -- A stranger may have put it into a queue again.
  drop_holds(id, (read_request(id, 'tenant') or {}).tenant)
  redis.call('DEL', request_key(id), tokens_key(id))
  return true
end

-- Whether to wait with a lost lease that would bury the request: its worker ran it alone and told of itself
-- so lately that it may be slow, not dead. Then the lease goes on until the worker counts as gone. Once an
-- attempt only, for a worker may also live and have lost the request.
local function may_live(id, max_crashes)
  local fields = read_request(id, 'crashes', 'alone', 'worker') or {}
  if fields.alone ~= '1' or whole(fields.crashes, 0) + 1 < max_crashes then return false end
  local gone_at = score_in(prefix .. 'workers', fields.worker or '') or 0
  if gone_at <= now then return false end
  redis.call('ZADD', leases, exact(gone_at), id)
  redis.call('HSET', request_key(id), 'alone', 2)
  return true
end

-- The worker that held the request crashed. Who was aboard twice is a suspect, to be run alone; only
-- one that was alone with its worker at a crash is known to have caused it. Returns the new state.
local function count_crash(id, score, max_crashes)
  local fields = read_request(id, 'crashes', 'alone') or {}
  local crashes, key = whole(fields.crashes, 0) + 1, request_key(id)
  redis.call('HSET', key, 'crashes', crashes)
  if fields.alone and crashes >= max_crashes then
    note_end_of_attempt(id, 'crashed alone')
    bury(id, crashes)
    return 'dead'
  end
  if crashes >= math.max(1, math.min(SHARED_CRASHES, max_crashes - 1)) then
    redis.call('HSET', key, 'suspect', 1)
  end
  back_to_waiting(id, score, fields.alone and 'crashed alone' or 'crashed', backoff(crashes))
  return 'waiting'
end
