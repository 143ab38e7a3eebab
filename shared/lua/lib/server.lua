-- uses: keys, numbers
-- The server's clock, the queue's settings, and commands on many values at once.
-- After an error of Redis inside a script, the writes before it remain and the rest does not run. So scripts use
-- pcall for keys to which a stranger (any other program that may write to the server) may have given another type.

local time = redis.call('TIME')
server.now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
server.now_text = numbers.exact(server.now)

-- A setting of the queue. Each is read at most once a call.
local settings = {}
function server.config(name, default)
  if settings[name] == nil then settings[name] = redis.call('HGET', keys.prefix .. 'config', name) or false end
  return settings[name] or default
end

-- Read several settings by one command, for later calls of `config`.
function server.read_settings(...)
  local values = redis.call('HMGET', keys.prefix .. 'config', ...)
  for nth, name in ipairs({...}) do settings[name] = values[nth] end
end

function server.number(name, default) return numbers.whole(server.config(name), default) end

-- Without memory, as a replica or with a full disk, Redis refuses the first write of a script. After a first
-- write, it accepts all others. So each script begins with a write that changes nothing, and Redis refuses the
-- whole script or none of it. Only scripts that add requests begin with a write that needs memory: accepted
-- requests continue to their end even if memory is full. Messages come last, so the script first checks that
-- the user may publish them.
local function check_channels()
  if not redis.acl_check_cmd then return end -- fakeredis knows no users
  for _, channel in ipairs({keys.channels .. 'control', keys.events('')}) do
    if not redis.acl_check_cmd('PUBLISH', channel, '') then
      error({err = 'NOPERM No permissions to publish on the channel ' .. channel})
    end
  end
end

function server.write_needs_memory()
  check_channels()
  redis.call('ZADD', keys.leases, 'XX', 0, '')
end

function server.write_needs_no_memory()
  check_channels()
  redis.call('ZREM', keys.leases, '')
end

-- Delete a key to which a stranger gave another type, so that its owner can write it anew.
function server.reset_if_not(kind, key)
  local found = redis.call('TYPE', key).ok
  if found ~= kind and found ~= 'none' then redis.call('DEL', key) end
end

-- The members of a sorted set; 0 if a stranger gave its key another type.
function server.size(key)
  local size = redis.pcall('ZCARD', key)
  return type(size) == 'number' and size or 0
end

-- One command for many values, in parts, because Lua's stack holds only some thousands. `call` is redis.call, or
-- redis.pcall after the first writes, when a key of another type must not stop the script.
function server.for_all(call, command, key, values)
  for from = 1, #values, 1000 do
    call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

-- The first `limit` members of a sorted set whose score is at most `score`.
function server.due(key, score, limit)
  local members = redis.pcall('ZRANGE', key, '-inf', score, 'BYSCORE', 'LIMIT', 0, limit)
  return members.err and {} or members
end

function server.score_in(key, member)
  local score = redis.pcall('ZSCORE', key, member)
  return type(score) == 'string' and tonumber(score) or nil
end

-- Work that a script does once for all its requests. Files in lib/ collect such work, and pass a function that
-- does it to `at_the_end`. Every script that moves requests calls `carry_out`.
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

-- Wake the workers that wait. Each of them looks for work within a millisecond for each worker that lives. Until an
-- eighth of them has looked, the others will see further requests too, so a large fleet gets no message for these.
local MANY_WORKERS, PARTS = 8, 8
function server.wake_workers()
  local num, woken = server.size(keys.prefix .. 'workers'), keys.prefix .. 'woken'
  if num > MANY_WORKERS then
    local last = redis.pcall('GET', woken)
    local passed = server.now - (type(last) == 'string' and tonumber(last) or 0)
    if passed >= 0 and passed < num / PARTS then return end
    redis.pcall('SET', woken, server.now_text, 'PX', num)
  end
  redis.call('PUBLISH', keys.channels .. 'control', 'pending')
end
