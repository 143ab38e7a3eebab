-- uses: keys, numbers, server
-- How much a holder, such as an API key, may take per minute. Each rate is a bucket that holds the amount of
-- one minute and fills evenly (generic cell rate algorithm, ATM Forum TM 4.0). The time at which it is full
-- again is stored. If that is more than a minute away, the bucket is overdrawn and gives nothing.

rate_buckets.MINUTE = 60000
local LONGEST_DEBT_MS = 365 * 86400000 -- bounds a value that a stranger wrote

function rate_buckets.key(holder) return keys.prefix .. 'rate:' .. holder end

-- The time at which a bucket is full again, or now if it is full.
function rate_buckets.full_at(key, name)
  local stored = redis.pcall('HGET', key, name)
  local at = type(stored) == 'string' and tonumber(stored) or server.now
  if at ~= at then at = server.now end
  return math.max(server.now, math.min(at, server.now + LONGEST_DEBT_MS))
end

-- The time at which a bucket is full again if `amount` more is taken.
function rate_buckets.full_after(at, amount, limit) return at + amount * rate_buckets.MINUTE / limit end

-- Store the time at which a bucket is full, with its fraction, because amounts may be small. The key is kept until
-- all the holder's buckets are full. `call` is redis.call, or redis.pcall if an error must not stop the script.
function rate_buckets.set_full_at(call, key, name, at)
  call('HSET', key, name, numbers.precise(math.min(at, server.now + LONGEST_DEBT_MS)))
  local fields, latest = redis.pcall('HGETALL', key), server.now + rate_buckets.MINUTE
  for _, stored in ipairs(fields.err and {} or fields) do -- the names are no numbers
    latest = math.max(latest, math.min(tonumber(stored) or 0, server.now + LONGEST_DEBT_MS))
  end
  call('PEXPIRE', key, numbers.exact(math.ceil(latest - server.now)))
end
