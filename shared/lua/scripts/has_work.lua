-- uses: keys, server
-- Look whether a claim might change or return anything. An idle worker calls this script before it claims, because
-- a claim takes the server several times as long. Changes nothing.
-- ARGV  1 fingerprint of the worker's model; '': any model
-- Reply 1 or 0

local function exists(key) return redis.call('EXISTS', key) == 1 end

-- The claim writes the queue's model, or refuses a worker with another model.
if ARGV[1] ~= '' and redis.pcall('HGET', keys.prefix .. 'model', 'fingerprint') ~= ARGV[1] then return 1 end
if server.config('paused') == '1' then return 0 end
if exists(keys.pending) or #server.due(keys.delayed, server.now_text, 1) > 0 then return 1 end
-- Beside tenants with waiting requests, the set has '', until a claim finds that no request waits or runs.
local names = redis.pcall('SRANDMEMBER', keys.tenants_waiting, 2)
if names.err or #names > 1 or #names == 1 and (names[1] ~= '' or not exists(keys.leases)) then return 1 end
return exists(keys.backlog) and not exists(keys.delayed) and 1 or 0 -- a claim deletes counts that are left over
