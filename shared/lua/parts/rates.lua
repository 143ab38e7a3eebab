-- uses: keys, numbers, server
-- What a holder, such as an API key, may take a minute. Each rate is a bucket that holds a minute's worth
-- and fills evenly (generic cell rate algorithm, ATM Forum TM 4.0): what is stored is the time at which it
-- is full again. More than a minute from now, the bucket is overdrawn, and gives nothing until it is not.

rates.MINUTE = 60000
local LONGEST_DEBT_MS = 365 * 86400000 -- so that whatever a stranger wrote stays a time

function rates.key(holder) return keys.prefix .. 'rate:' .. holder end

-- When a bucket is full again: now, for one that is.
function rates.full_at(key, name)
  local stored = redis.pcall('HGET', key, name)
  local at = type(stored) == 'string' and tonumber(stored) or server.now
  if at ~= at then at = server.now end
  return math.max(server.now, math.min(at, server.now + LONGEST_DEBT_MS))
end

-- The same once so much more was taken.
function rates.full_after(at, amount, limit) return at + amount * rates.MINUTE / limit end

-- Write that down, with the fractions of small amounts, for as long as any bucket of the holder's is not
-- full. `call` is redis.call, or redis.pcall where nothing may stop what comes after.
function rates.set_full_at(call, key, name, at)
  call('HSET', key, name, numbers.precise(math.min(at, server.now + LONGEST_DEBT_MS)))
  local fields, latest = redis.pcall('HGETALL', key), server.now + rates.MINUTE
  for _, stored in ipairs(fields.err and {} or fields) do -- the names are no numbers
    latest = math.max(latest, math.min(tonumber(stored) or 0, server.now + LONGEST_DEBT_MS))
  end
  call('PEXPIRE', key, numbers.exact(math.ceil(latest - server.now)))
end
