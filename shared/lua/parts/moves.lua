-- How a request moves: into the queue, back to it, and to its one end.

local function carry_out()
  for key, ids in pairs(removals) do try_for_all('ZREM', key, ids) end
  if #finished_outputs > 0 then
    try_for_all('LPUSH', outputs, finished_outputs)
    redis.pcall('LTRIM', outputs, 0, MAX_OUTPUTS - 1)
  end
  for field, change in pairs(backlog_changes) do
    local left = change ~= 0 and redis.pcall('HINCRBY', backlog, field, exact(change))
    if type(left) == 'number' and left <= 0 then redis.call('HDEL', backlog, field) end
  end
  for key, services in pairs(charges) do charge(key, services) end
  removals, finished_outputs, backlog_changes, charges = {}, {}, {}, {}
end

-- When requests finished and with how many tokens, newest first: {{ms, count}, ...}.
local function read_outputs()
  local entries, found = redis.pcall('LRANGE', outputs, 0, -1), {}
  for _, entry in ipairs(entries.err and {} or entries) do
    local at, count = string.match(entry, '^(%d+) (%d+)$')
    if at then found[#found + 1] = {tonumber(at), tonumber(count)} end
  end
  return found
end

local HOLDS = {leases, deadlines, delayed}
local function drop_holds(id, tenant)
  remove_later(pending_of(tenant_name(tenant)), id)
  for i = 1, #HOLDS do remove_later(HOLDS[i], id) end
end

-- For how long logs and hashes outlive the end (ms): a hash at least as long as its log, as an id whose
-- hash is gone may be used again.
local function log_ttl() return whole(config('log_ttl_ms'), 60000) end
local function result_ttl() return math.max(log_ttl(), whole(config('result_ttl_ms'), 3600000)) end

-- Whether somebody is to be told of the end by HTTP. A claim notes it as the request's field `webhook`,
-- so that no end has to read a payload that may be large.
-- So long a result is kept for whoever calls webhooks, at least: all attempts take a day.
local WEBHOOK_MS = 26 * 3600000
local function wants_webhook(payload)
  return payload and string.find(payload, '"webhook_url"', 1, true) ~= nil
end

-- Append and publish the last event (`count`, as text, tokens come before its end), keep the result, let go
-- of every hold. `result` is given by a worker that has it at hand; otherwise the log is folded into it,
-- before anything is written. The exact length of the prompt is given where the hash does not say it yet.
local function finish(id, reason, count, event, tenant, result, prompt_tokens)
  result = result or fold_log(id, event)
  redis.pcall('XADD', tokens_key(id), count .. '-1', 'event', event)
  redis.pcall('PEXPIRE', tokens_key(id), log_ttl())
  publish_event(id, event)
  local key = request_key(id)
  if prompt_tokens then
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result, 'prompt_tokens', prompt_tokens)
  else
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result)
  end
  local ttl = result_ttl()
  if redis.pcall('HEXISTS', key, 'webhook') == 1 then
    redis.pcall('ZADD', prefix .. 'webhooks', now_text, id)
    redis.pcall('ZREMRANGEBYSCORE', prefix .. 'webhooks', '-inf', exact(now - WEBHOOK_MS))
    ttl = math.max(ttl, WEBHOOK_MS)
  end
  redis.pcall('PEXPIRE', key, exact(ttl))
  drop_holds(id, tenant)
  if reason == 'stop' or reason == 'length' then
    finished_outputs[#finished_outputs + 1] = now_text .. ' ' .. count
  end
end

-- End a request without a worker: cancelled, expired, or an error. Returns whether it had not ended yet.
local function finish_bare(id, reason, error_type, message)
  local fields = read_request(id, 'attempt', 'prompt_tokens', 'state', 'tenant', 'tokens', 'payload') or {}
  local count, ended = log_top(id)
  leave_backlog(id, fields)
  if ended or is_final(fields.state) then
    drop_holds(id, fields.tenant)
    return false
  end
  local event = bare_last_event(count, whole(fields.attempt, 0),
    whole(fields.prompt_tokens, 0), reason, error_type, message)
  if wants_webhook(fields.payload) then redis.pcall('HSET', request_key(id), 'webhook', 1) end
  finish(id, reason, exact(count), event, fields.tenant)
  return true
end

-- Whether a request's deadline has passed. Mostly none has, so that is asked first, once a call.
local some_have_passed
local function is_past_deadline(id)
  if some_have_passed == nil then some_have_passed = #due(deadlines, now_text, 1) > 0 end
  local deadline = some_have_passed and score_in(deadlines, id)
  return deadline and deadline <= now
end

-- A place in the queue as it was kept; the end of the queue where a stranger spoilt it.
local function place(score)
  local number = tonumber(score or nil)
  if not number or number ~= number then number = now end
  return string.format('%.17g', number)
end

-- Move delayed requests whose time has come to pending. Returns how many.
local function promote_delayed()
  local ids = due(delayed, now_text, 100)
  for _, id in ipairs(ids) do
    local fields = read_request(id, 'score', 'state', 'tenant') or {}
    if fields.state == 'waiting' then count_later('delayed', tenant_name(fields.tenant), -1) end
    put_waiting(id, place(fields.score), fields.tenant)
    redis.call('ZREM', delayed, id)
  end
  return #ids
end

-- What a level of priority is worth in the queue's scores. Aging lets it overtake by at most so long;
-- a strict level is wider than any time.
local function priority_level()
  return config('strict_priority') == '1' and 2199023255552 or whole(config('aging_ms'), 60000)
end

-- The queue score of a request that arrives now: lower runs first.
local function score_of(priority)
  return now + priority * priority_level()
end

local MAX_HISTORY = 16

-- Note in the request's `history` how its current attempt ended.
local function note_end_of_attempt(id, how)
  local fields = read_request(id, 'history', 'attempt', 'worker', 'claimed_at') or {}
  local parsed, history = pcall(cjson.decode, fields.history or '[]')
  if not parsed or type(history) ~= 'table' or history[1] == nil then history = {} end
  while #history >= MAX_HISTORY do table.remove(history, 1) end
  history[#history + 1] = {
    attempt = whole(fields.attempt, 0), worker = fields.worker or '',
    claimed_at = whole(fields.claimed_at, 0), ended_at = now, how = how,
  }
  local encoded, text = pcall(cjson.encode, history)
  if encoded then redis.call('HSET', request_key(id), 'history', text) end
end

-- Put a request that is not held (any more) in its old place, after `delay_ms` if that is given.
-- `how` says how the attempt at it ended, if that is worth a note.
local function back_to_waiting(id, score, how, delay_ms)
  if how then note_end_of_attempt(id, how) end
  local fields = read_request(id, 'state', 'tenant', 'tokens') or {}
  if fields.state ~= 'waiting' then
    count_later('tokens', tenant_name(fields.tenant), whole(fields.tokens, 0))
  end
  redis.call('HSET', request_key(id), 'state', 'waiting')
  redis.call('HDEL', request_key(id), 'fence', 'worker', 'alone')
  redis.call('ZREM', leases, id)
  local waits = delay_ms and delay_ms > 0 and redis.pcall('ZADD', delayed, exact(now + delay_ms), id)
  if type(waits) == 'number' then
    remove_later(pending, id) -- where a plain client may have put it in again meanwhile
    remove_later(pending_of(tenant_name(fields.tenant)), id)
    count_later('delayed', tenant_name(fields.tenant), 1)
  else
    put_waiting(id, place(score), fields.tenant)
  end
end
