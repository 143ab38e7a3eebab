-- uses: keys, numbers
-- The server's clock, the queue's settings, and commands on many values at once.
-- Redis errors inside a script keep what came before and lose what comes after, so whatever a
-- stranger's key may have the wrong type for is reached with pcall.

local time = redis.call('TIME')
server.now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
server.now_text = numbers.exact(server.now)

-- A setting of the queue; each is read once a call at most.
local settings = {}
function server.config(name, default)
  if settings[name] == nil then settings[name] = redis.call('HGET', keys.prefix .. 'config', name) or false end
  return settings[name] or default
end
function server.number(name, default) return numbers.whole(server.config(name), default) end

-- Redis refuses a write for want of memory, as a replica or with a full disk only as long as its
-- script has not written; once a first write was let through, all are. So each script begins with one
-- that changes nothing, and is refused whole or not at all. Those that only keep order, and do not
-- add to what is stored, are not refused for want of memory.
function server.write_needs_memory() redis.call('ZADD', keys.leases, 'XX', 0, '') end
function server.write_needs_no_memory() redis.call('ZREM', keys.leases, '') end

-- One command for many values, by redis.call, or by redis.pcall in the midst of writing, where a key of
-- another type must not stop what comes after. In pieces: Lua's stack takes some thousands at once.
function server.for_all(call, command, key, values)
  for from = 1, #values, 1000 do
    call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

-- The first members of a sorted set whose score is no more than that.
function server.due(key, score, limit)
  local members = redis.pcall('ZRANGE', key, '-inf', score, 'BYSCORE', 'LIMIT', 0, limit)
  return members.err and {} or members
end

function server.score_in(key, member)
  local score = redis.pcall('ZSCORE', key, member)
  return type(score) == 'string' and tonumber(score) or nil
end

-- What a script does once for all its requests instead of once for each. Parts gather it, and say with
-- `at_the_end` how it is done; every script that moves requests carries it out.
local actions, removals = {}, {}
function server.at_the_end(action) actions[#actions + 1] = action end
function server.carry_out()
  for _, action in ipairs(actions) do action() end
end

function server.remove_later(key, member)
  local members = removals[key]
  if members then members[#members + 1] = member else removals[key] = {member} end
end

server.at_the_end(function()
  for key, members in pairs(removals) do server.for_all(redis.pcall, 'ZREM', key, members) end
  removals = {}
end)

function server.wake_workers() redis.call('PUBLISH', keys.prefix .. 'control', 'pending') end
