-- Numbers are text in keys, fields and payloads.

-- A whole number as text. Lua would print large ones as 1.2e+15; keys and scores need every digit.
function numbers.exact(number) return string.format('%.0f', number) end

-- A number as text with its fraction.
function numbers.precise(number) return string.format('%.17g', number) end

-- A field as a whole number, or the default if it is missing or a stranger wrote something else.
function numbers.whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number in the JSON of a payload that plain commands enqueued, found without decoding it. Quotes cannot be
-- bare inside a JSON string, so a match is a key. It may belong to a nested object, so the value is only an
-- estimate. A pattern alone would try each of up to 8 million bytes.
function numbers.in_json(payload, name)
  local key, stop = '"' .. name .. '"', 0
  while stop do
    local number = stop > 0 and string.match(payload, '^%s*:%s*(-?%d+)', stop + 1)
    if number then return tonumber(number) end
    stop = select(2, string.find(payload, key, stop + 1, true))
  end
end
