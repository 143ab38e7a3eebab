-- Stands in front of every script: names, time, the request log, and the one way a request ends.
-- KEYS[1] is always the queue's `pending`; all other names are built on its prefix, which carries
-- the queue as hash tag, so that a script stays on one cluster shard.
-- Redis errors inside a script keep what came before and lose what comes after, so whatever a
-- stranger's key may have the wrong type for is reached with pcall.

local pending = KEYS[1]
local prefix = string.sub(pending, 1, -8)

local leases, deadlines = prefix .. 'leases', prefix .. 'deadlines'
local delayed, control, outputs = prefix .. 'delayed', prefix .. 'control', prefix .. 'outputs'

local STATE_AFTER = {
  stop = 'completed', length = 'completed', cancelled = 'cancelled', expired = 'expired',
  error = 'failed',
}
local IS_FINAL = {completed = true, failed = true, cancelled = true, expired = true, dead = true}
local MAX_OUTPUTS = 128 -- how many finished requests the measured p90 of output looks back on

local function request_key(id) return prefix .. 'request:' .. id end
local function tokens_key(id) return prefix .. 'tokens:' .. id end

-- Lua would print large numbers as 1.2e+15; keys and scores need every digit.
local function exact(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_text = exact(now)

-- A setting of the queue; each is read once a call at most.
local settings = {}
local function config(name, default)
  if settings[name] == nil then settings[name] = redis.call('HGET', prefix .. 'config', name) or false end
  return settings[name] or default
end

-- What a script does once for all its requests instead of once for each: members to be removed, by
-- their sorted set, output lengths, newest last, changes of the backlog, by their field, and service
-- received, by its counters and the tenant. Every script that moves requests carries it out.
local removals, finished_outputs, backlog_changes, charges = {}, {}, {}, {}

-- Redis refuses a write for want of memory, as a replica or with a full disk only as long as its
-- script has not written; once a first write was let through, all are. So each script begins with one
-- that changes nothing, and is refused whole or not at all. Those that only keep order, and do not
-- add to what is stored, are not refused for want of memory.
local function write_needs_memory() redis.call('ZADD', leases, 'XX', 0, '') end
local function write_needs_no_memory() redis.call('ZREM', leases, '') end

-- One command for many values. In pieces: Lua's stack takes some thousands at once.
local function call_for_all(command, key, values)
  for from = 1, #values, 1000 do
    redis.call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

-- A tenant's name; that of the tenant without a name for what no key should hold.
local function tenant_name(value)
  if value and #value <= 64 and string.find(value, '^[%w_.%-]+$') then return value end
  return ''
end

-- The ids of a tenant that wait; plain `pending` is that of the tenant without a name.
local function pending_of(tenant)
  return tenant == '' and pending or pending .. ':' .. tenant
end

-- Tenants that have something waiting, for claims to look at.
local tenants_waiting = prefix .. 'tenants:waiting'

-- Service by tenant; each priority shares its tokens among those who wait at it. The member `*` is the
-- clock: what the tenant that was served last had received, the least of all who waited. Who has no
-- counter starts there, so that time spent idle is neither saved up nor held against anyone.
local function counters_of(priority)
  priority = math.max(-1000, math.min(1000, math.floor(priority)))
  return prefix .. 'tenants' .. (priority == 0 and '' or string.format(':%d', priority))
end

local PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2 -- of a token's service, as in the paper (OSDI 2024)
local COUNTERS_TTL_MS = 3600000           -- of a priority at which nobody was served so long

local function weight_of(tenant)
  local weight = tonumber(config('weight:' .. tenant) or nil)
  return weight and weight >= 1e-6 and weight <= 1e6 and weight or 1
end

-- Service that was given meanwhile. Tenants share only what was claimed while there were any.
local function charge_later(tenant, priority, service)
  local key = counters_of(priority)
  charges[key] = charges[key] or {}
  charges[key][tenant] = (charges[key][tenant] or 0) + service
end

local function score_in(key, member)
  local score = redis.pcall('ZSCORE', key, member)
  return type(score) == 'string' and tonumber(score) or nil
end

local function charge(key, services)
  for tenant, service in pairs(services) do
    service = service / weight_of(tenant)
    if redis.pcall('ZADD', key, 'XX', 'INCR', string.format('%.17g', service), tenant) == false then
      local clock = score_in(key, '*') or 0
      redis.call('ZADD', key, string.format('%.17g', clock + service), tenant)
      redis.call('PEXPIRE', key, COUNTERS_TTL_MS)
    end
  end
end

-- What waits, for the limits of `enqueue`: a request counts from when a script makes its state
-- `waiting` until a script makes it another one.
local backlog = prefix .. 'backlog'

local function count_later(kind, tenant, change)
  if change == 0 then return end
  local field = kind .. ':' .. tenant
  backlog_changes[field] = (backlog_changes[field] or 0) + change
end

-- The same in the midst of writing, where a key of another type must not stop what comes after.
local function try_for_all(command, key, values)
  for from = 1, #values, 1000 do
    redis.pcall(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

local function remove_later(key, id)
  local ids = removals[key]
  if ids then ids[#ids + 1] = id else removals[key] = {id} end
end

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

-- A field as a whole number; the default where it is missing or a stranger wrote something else.
local function whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number of a payload that plain commands enqueued, which is known by its JSON alone. Bare quotes
-- cannot stand inside a JSON string, so a match is a key; at worst one of a nested object, and what
-- is read this way is only an estimate.
local function number_in(payload, name)
  return tonumber(string.match(payload, '"' .. name .. '"%s*:%s*(-?%d+)'))
end

local DEFAULT_OUTPUT = 256 -- expected output while no request has finished yet

-- Length of a prompt by that of its payload, until a tokenizer has seen it.
local function estimated_prompt(payload_length) return math.ceil(payload_length / 4) end

-- Tokens that a request counts as while it waits.
local function estimated_tokens(payload)
  local max_tokens = number_in(payload, 'max_tokens') or DEFAULT_OUTPUT
  return estimated_prompt(#payload) + math.max(0, math.min(max_tokens, 2147483648))
end

local publish_command = config('pubsub') == 'sharded' and 'SPUBLISH' or 'PUBLISH'

local function publish_event(id, event)
  redis.call(publish_command, prefix .. 'events:' .. id, event)
end

-- Fields of a request's hash as a table; nil if the key is of another type.
local function read_request(id, ...)
  local values = redis.pcall('HMGET', request_key(id), ...)
  if values.err then return nil end
  local names, fields = {...}, {}
  for i = 1, #names do fields[names[i]] = values[i] or nil end
  return fields
end

local function is_final(state)
  return IS_FINAL[state] or false
end

-- How many tokens the log holds, and whether its last event is there.
local function log_top(id)
  local top = redis.pcall('XREVRANGE', tokens_key(id), '+', '-', 'COUNT', 1)
  if top.err or #top == 0 then return 0, false end
  local count, is_last = string.match(top[1][1], '^(%d+)-(%d+)$')
  return tonumber(count), is_last == '1'
end

-- Every event of the log, oldest first, as JSON.
local function log_events(id)
  local entries = redis.pcall('XRANGE', tokens_key(id), '-', '+')
  local events = {}
  if entries.err then return events end
  for i, entry in ipairs(entries) do events[i] = entry[2][2] end
  return events
end

-- The whole log as one result. Built by hand where cjson would turn an empty array into {}.
local function fold_log(id)
  local texts, token_ids, logprobs, last = {}, {}, {}, {}
  for _, json in ipairs(log_events(id)) do
    local parsed, event = pcall(cjson.decode, json)
    if parsed and type(event) == 'table' and type(event.token_ids) == 'table' then
      last = event
      texts[#texts + 1] = last.text
      for _, token_id in ipairs(last.token_ids) do token_ids[#token_ids + 1] = exact(token_id) end
      if type(last.logprobs) == 'table' then
        for _, item in ipairs(last.logprobs) do logprobs[#logprobs + 1] = cjson.encode(item) end
      end
    end
  end
  local parts = {
    '"text":' .. cjson.encode(table.concat(texts)),
    '"token_ids":[' .. table.concat(token_ids, ',') .. ']',
    '"logprobs":' .. (#logprobs > 0 and '[' .. table.concat(logprobs, ',') .. ']' or 'null'),
  }
  for _, name in ipairs({'finish_reason', 'usage', 'stats', 'error'}) do
    if type(last[name]) == 'string' or type(last[name]) == 'table' then
      parts[#parts + 1] = cjson.encode(name) .. ':' .. cjson.encode(last[name])
    end
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

-- A last event that no worker made: nothing but the reason, and the usage so far.
local function bare_last_event(index, attempt, prompt_tokens, reason, error_type, message)
  local event = string.format(
    '{"index":%d,"token_ids":[],"text":"","logprobs":null,"finish_reason":"%s","attempt":%d,' ..
    '"usage":{"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0}',
    index, reason, attempt, prompt_tokens, index)
  if error_type then
    event = event .. ',"error":{"type":' .. cjson.encode(error_type) ..
      ',"message":' .. cjson.encode(message) .. '}'
  end
  return event .. '}'
end

local HOLDS = {leases, deadlines, delayed}
local function drop_holds(id, tenant)
  remove_later(pending_of(tenant_name(tenant)), id)
  for i = 1, #HOLDS do remove_later(HOLDS[i], id) end
end

-- Put an id into its tenant's queue; into plain `pending` where a stranger spoilt that.
local function put_waiting(id, score, tenant)
  tenant = tenant_name(tenant)
  local known = tenant ~= '' and redis.pcall('SADD', tenants_waiting, tenant)
  if type(known) == 'number' and type(redis.pcall('ZADD', pending_of(tenant), score, id)) == 'number' then
    return
  end
  redis.call('ZADD', pending, score, id)
end

-- The keys of all tenants' queues, plain `pending` first.
local function waiting_queues()
  local keys, tenants = {pending}, redis.pcall('SMEMBERS', tenants_waiting)
  for _, tenant in ipairs(tenants.err and {} or tenants) do
    local key = pending_of(tenant_name(tenant))
    if key ~= pending and redis.call('TYPE', key).ok == 'zset' then keys[#keys + 1] = key end
  end
  return keys
end

-- A request stops waiting. `fields`: state, tenant and tokens as they were before.
local function leave_backlog(id, fields)
  if fields.state ~= 'waiting' then return end
  local tenant = tenant_name(fields.tenant)
  count_later('tokens', tenant, -whole(fields.tokens, 0))
  if redis.call('ZSCORE', delayed, id) then count_later('delayed', tenant, -1) end
end

-- Write a prompt's exact length, and set right what was charged by an estimate. `tenant` is nil for
-- those who are not charged.
local function tell_prompt_tokens(id, prompt_tokens, tenant, priority)
  local key = request_key(id)
  if redis.call('HSET', key, 'prompt_tokens', prompt_tokens) == 1 and tenant then
    local estimate = estimated_prompt(redis.call('HSTRLEN', key, 'payload'))
    local service = PROMPT_WEIGHT * (tonumber(prompt_tokens) - estimate)
    charge_later(tenant_name(tenant), whole(priority, 0), service)
  end
end

-- Append and publish the last event (`count`, as text, tokens come before its end), fold the log into the result, let go of every hold. `result`
-- is given by a worker that has it at hand; otherwise the log is read once more. So is the exact
-- length of the prompt, where the hash does not say it yet.
local function finish(id, reason, count, event, tenant, result, prompt_tokens)
  redis.pcall('XADD', tokens_key(id), count .. '-1', 'event', event)
  result = result or fold_log(id)
  redis.pcall('PEXPIRE', tokens_key(id), whole(config('log_ttl_ms'), 60000))
  publish_event(id, event)
  local key = request_key(id)
  if prompt_tokens then
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result, 'prompt_tokens', prompt_tokens)
  else
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result)
  end
  redis.pcall('PEXPIRE', key, whole(config('result_ttl_ms'), 3600000))
  drop_holds(id, tenant)
  if reason == 'stop' or reason == 'length' then
    finished_outputs[#finished_outputs + 1] = now_text .. ' ' .. count
  end
end

-- End a request without a worker: cancelled, expired, or an error.
local function finish_bare(id, reason, error_type, message)
  local fields = read_request(id, 'attempt', 'prompt_tokens', 'state', 'tenant', 'tokens') or {}
  local count, ended = log_top(id)
  leave_backlog(id, fields)
  if ended then return drop_holds(id, fields.tenant) end
  local event = bare_last_event(count, whole(fields.attempt, 0),
    whole(fields.prompt_tokens, 0), reason, error_type, message)
  finish(id, reason, exact(count), event, fields.tenant)
end

-- Ids whose deadline has passed, as a set.
local function past_deadline()
  local passed = {}
  for _, id in ipairs(redis.call('ZRANGE', deadlines, '-inf', now_text, 'BYSCORE',
    'LIMIT', 0, 1000)) do passed[id] = true end
  return passed
end

-- A place in the queue as it was kept; the end of the queue where a stranger spoilt it.
local function place(score)
  local number = tonumber(score or nil)
  if not number or number ~= number then number = now end
  return string.format('%.17g', number)
end

-- Move delayed requests whose time has come to pending. Returns how many.
local function promote_delayed()
  local due = redis.call('ZRANGE', delayed, '-inf', now_text, 'BYSCORE', 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    local fields = read_request(id, 'score', 'state', 'tenant') or {}
    if fields.state == 'waiting' then count_later('delayed', tenant_name(fields.tenant), -1) end
    put_waiting(id, place(fields.score), fields.tenant)
    redis.call('ZREM', delayed, id)
  end
  return #due
end

-- The queue score of a request that arrives now: lower runs first. Aging lets each level of
-- priority overtake by at most so long; a strict level is wider than any time.
local function score_of(priority)
  local level = config('strict_priority') == '1' and 2199023255552
    or whole(config('aging_ms'), 60000)
  return now + priority * level
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
-- `how` says how the attempt at it ended.
local function back_to_waiting(id, score, how, delay_ms)
  note_end_of_attempt(id, how)
  local fields = read_request(id, 'state', 'tenant', 'tokens') or {}
  if fields.state ~= 'waiting' then
    count_later('tokens', tenant_name(fields.tenant), whole(fields.tokens, 0))
  end
  redis.call('HSET', request_key(id), 'state', 'waiting')
  redis.call('HDEL', request_key(id), 'fence', 'worker', 'alone')
  redis.call('ZREM', leases, id)
  if delay_ms and delay_ms > 0 then
    redis.call('ZADD', delayed, exact(now + delay_ms), id)
    count_later('delayed', tenant_name(fields.tenant), 1)
  else
    put_waiting(id, place(score), fields.tenant)
  end
end

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
  redis.call('PERSIST', request_key(id))
  redis.call('ZADD', prefix .. 'dead', now_text, id)
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

local function wake_workers()
  redis.call('PUBLISH', control, 'pending')
end
