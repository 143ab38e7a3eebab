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

-- The same in the midst of writing, where a key of another type must not stop what comes after.
local function try_for_all(command, key, values)
  for from = 1, #values, 1000 do
    redis.pcall(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

-- The first members of a sorted set whose score is no more than that.
local function due(key, score, limit)
  local members = redis.pcall('ZRANGE', key, '-inf', score, 'BYSCORE', 'LIMIT', 0, limit)
  return members.err and {} or members
end

local function score_in(key, member)
  local score = redis.pcall('ZSCORE', key, member)
  return type(score) == 'string' and tonumber(score) or nil
end

local function remove_later(key, id)
  local ids = removals[key]
  if ids then ids[#ids + 1] = id else removals[key] = {id} end
end

-- A field as a whole number; the default where it is missing or a stranger wrote something else.
local function whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number of a payload that plain commands enqueued, which is known by its JSON alone. Bare quotes
-- cannot stand inside a JSON string, so a match is a key; at worst one of a nested object, and what
-- is read this way is only an estimate. A pattern alone would look at each of 8 million bytes in turn.
local function number_in(payload, name)
  local key, stop = '"' .. name .. '"', 0
  while stop do
    local number = stop > 0 and string.match(payload, '^%s*:%s*(-?%d+)', stop + 1)
    if number then return tonumber(number) end
    stop = select(2, string.find(payload, key, stop + 1, true))
  end
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

local function wake_workers()
  redis.call('PUBLISH', control, 'pending')
end
