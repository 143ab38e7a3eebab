-- uses: keys, numbers, server
-- Large pictures, which are stored once and which payloads only name. A picture is a hash: `url` has its data URL,
-- and a field `request:ID` stands for each request that needs it. These fields are a set and no count, so an end
-- that is reported twice changes nothing.

local MAX_BYTES = 8 * 1024 * 1024 -- of a payload with its pictures
local MARK, NAME_LENGTH, QUOTE = '"sha256:', 64, 34

function pictures.key(name) return keys.prefix .. 'picture:' .. name end
function pictures.field(id) return 'request:' .. id end

-- The names in a request's field `pictures`.
local function names_in(list) return string.gmatch(list or '', '%S+') end

-- Store pictures that a request needs, so that they do not expire. `urls` has the data URLs of new pictures.
function pictures.keep(id, list, urls)
  for name in names_in(list) do
    local key = pictures.key(name)
    server.reset_if_not('hash', key)
    if urls and urls[name] then redis.call('HSETNX', key, 'url', urls[name]) end
    redis.call('HSET', key, pictures.field(id), '')
    redis.call('PERSIST', key)
  end
end

-- Let a picture expire if no request needs it.
function pictures.expire_unneeded(name, ttl_ms)
  local key = pictures.key(name)
  if redis.pcall('HLEN', key) == 1 then redis.pcall('PEXPIRE', key, numbers.exact(ttl_ms)) end
end

-- A request needs its pictures no longer.
function pictures.let_go(id, list, ttl_ms)
  for name in names_in(list) do
    redis.pcall('HDEL', pictures.key(name), pictures.field(id))
    pictures.expire_unneeded(name, ttl_ms)
  end
end

-- The position after the JSON string, a picture's name, that begins at `at`; nil for any other string.
function pictures.end_of_name(payload, at)
  local stop = at + #MARK + NAME_LENGTH
  return string.byte(payload, stop) == QUOTE and stop + 1 or nil
end

-- Returns a payload with its pictures' data URLs in place of their names. A name without a picture stays. What is
-- longer than a payload may be is left incomplete, because the worker refuses it.
function pictures.insert(payload, list)
  local urls, parts, size, from = {}, {}, #payload, 1
  local at = string.find(payload, MARK, 1, true)
  while at and size <= MAX_BYTES do
    local stop = pictures.end_of_name(payload, at)
    local name = stop and string.sub(payload, at + #MARK, stop - 2)
    if name and string.find(list, name, 1, true)
        and string.find(string.sub(payload, math.max(1, at - 16), at - 1), '"url"%s*:%s*$') then
      urls[name] = urls[name] or redis.pcall('HGET', pictures.key(name), 'url')
      if type(urls[name]) == 'string' then
        parts[#parts + 1] = string.sub(payload, from, at)
        parts[#parts + 1] = urls[name]
        size, from = size + #urls[name], stop - 1
      end
    end
    at = string.find(payload, MARK, stop or at + 1, true)
  end
  parts[#parts + 1] = string.sub(payload, from)
  return table.concat(parts)
end
