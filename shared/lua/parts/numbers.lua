-- Numbers as keys, fields and payloads hold them: text.

-- Lua would print large numbers as 1.2e+15; keys and scores need every digit.
function numbers.exact(number) return string.format('%.0f', number) end

-- With its fraction.
function numbers.precise(number) return string.format('%.17g', number) end

-- A field as a whole number; the default where it is missing or a stranger wrote something else.
function numbers.whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number of a payload that plain commands enqueued, which is known by its JSON alone. Bare quotes
-- cannot stand inside a JSON string, so a match is a key; at worst one of a nested object, and what
-- is read this way is only an estimate. A pattern alone would look at each of 8 million bytes in turn.
function numbers.in_json(payload, name)
  local key, stop = '"' .. name .. '"', 0
  while stop do
    local number = stop > 0 and string.match(payload, '^%s*:%s*(-?%d+)', stop + 1)
    if number then return tonumber(number) end
    stop = select(2, string.find(payload, key, stop + 1, true))
  end
end
