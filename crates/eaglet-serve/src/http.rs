//! The HTTP/1.1 the face needs: requests out of bytes, reply heads and chunks into bytes.
//!
//! Pure: no socket is touched here. It is no general HTTP library: no `Expect: 100-continue`, no upgrades, no compression, and
//! header values are read as Latin-1.
//!
//! Invariants: [`parse`] takes nothing from its buffer until a whole request is there, and what lies after that request is left
//! for the next call, so pipelined requests come out one by one.

use bytes::Bytes;

/// The longest request head accepted, in bytes.
pub const HEAD_LIMIT_BYTES: usize = 64 << 10;
/// The longest request body accepted, in bytes.
pub const BODY_LIMIT_BYTES: usize = 64 << 20;
/// The chunk that ends a chunked body.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// One request, whole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The method as it came, such as `POST`.
    pub method: String,
    /// The target without its query.
    pub path: String,
    /// Names in lower case, in the order they came.
    pub headers: Vec<(String, String)>,
    /// The body with its chunk framing removed.
    pub body: Bytes,
    /// Whether the client lets the connection be used again.
    pub keep_alive: bool,
}

impl Request {
    /// The first header of that lower-case name.
    pub fn header(&self, name: &str) -> Option<&str> {
        header(&self.headers, name)
    }
}

fn header<'h>(headers: &'h [(String, String)], name: &str) -> Option<&'h str> {
    headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
}

/// Bytes that are no HTTP request; the text says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Malformed(pub String);

fn malformed<T>(why: impl Into<String>) -> Result<T, Malformed> {
    Err(Malformed(why.into()))
}

/// Reads the request at the start of `buffer`: the request and how many bytes it took, or `None` while it is incomplete.
///
/// # Errors
/// When the bytes can no longer become a request, or pass [`HEAD_LIMIT_BYTES`] or [`BODY_LIMIT_BYTES`].
pub fn parse(buffer: &[u8]) -> Result<Option<(Request, usize)>, Malformed> {
    let Some(head_length) = memchr::memmem::find(buffer, b"\r\n\r\n") else {
        if buffer.len() > HEAD_LIMIT_BYTES {
            return malformed(format!("the request head passes {HEAD_LIMIT_BYTES} bytes"));
        }
        return Ok(None);
    };
    let text: String = buffer[..head_length].iter().map(|&byte| char::from(byte)).collect();
    let mut lines = text.split("\r\n");
    let (method, target, version) = request_line(lines.next().unwrap_or_default())?;
    let headers = lines.map(header_line).collect::<Result<Vec<_>, _>>()?;
    let rest = &buffer[head_length + 4..];
    let Some((body, body_length)) = body(&headers, rest)? else {
        return Ok(None);
    };
    let connection = header(&headers, "connection").unwrap_or_default().to_ascii_lowercase();
    let keep_alive = if version == "HTTP/1.0" { connection == "keep-alive" } else { connection != "close" };
    let path = target.split('?').next().unwrap_or_default().to_owned();
    let request = Request { method: method.to_owned(), path, headers, body, keep_alive };
    Ok(Some((request, head_length + 4 + body_length)))
}

fn request_line(line: &str) -> Result<(&str, &str, &str), Malformed> {
    let mut words = line.split(' ');
    match (words.next(), words.next(), words.next(), words.next()) {
        (Some(method), Some(target), Some(version @ ("HTTP/1.1" | "HTTP/1.0")), None) if !method.is_empty() => {
            Ok((method, target, version))
        }
        _ => malformed(format!("no request line: {line:?}")),
    }
}

fn header_line(line: &str) -> Result<(String, String), Malformed> {
    match line.split_once(':') {
        Some((name, value)) if !name.is_empty() && !name.contains(' ') => {
            Ok((name.to_ascii_lowercase(), value.trim().to_owned()))
        }
        _ => malformed(format!("no header line: {line:?}")),
    }
}

/// The body at the start of `rest` and its length on the wire, or `None` while it is incomplete.
fn body(headers: &[(String, String)], rest: &[u8]) -> Result<Option<(Bytes, usize)>, Malformed> {
    let chunked = header(headers, "transfer-encoding").is_some_and(|value| value.eq_ignore_ascii_case("chunked"));
    if chunked {
        return chunked_body(rest);
    }
    let length = match header(headers, "content-length") {
        None => 0,
        Some(value) => match value.parse::<usize>() {
            Ok(length) if length <= BODY_LIMIT_BYTES => length,
            _ => {
                return malformed(format!("content-length is {value:?}, at most {BODY_LIMIT_BYTES} is accepted"));
            }
        },
    };
    Ok((rest.len() >= length).then(|| (Bytes::copy_from_slice(&rest[..length]), length)))
}

fn chunked_body(rest: &[u8]) -> Result<Option<(Bytes, usize)>, Malformed> {
    let mut body = Vec::new();
    let mut position = 0;
    loop {
        let Some(line_length) = memchr::memmem::find(&rest[position..], b"\r\n") else {
            return Ok(None);
        };
        let line = String::from_utf8_lossy(&rest[position..position + line_length]);
        let size_text = line.split(';').next().unwrap_or_default().trim();
        let Ok(size) = usize::from_str_radix(size_text, 16) else {
            return malformed(format!("no chunk size: {line:?}"));
        };
        if size > BODY_LIMIT_BYTES || body.len() + size > BODY_LIMIT_BYTES {
            return malformed(format!("the chunked body passes {BODY_LIMIT_BYTES} bytes"));
        }
        position += line_length + 2;
        if size == 0 {
            return Ok(skip_trailers(rest, position).map(|end| (Bytes::from(body), end)));
        }
        if rest.len() < position + size + 2 {
            return Ok(None);
        }
        body.extend_from_slice(&rest[position..position + size]);
        position += size;
        if &rest[position..position + 2] != b"\r\n" {
            return malformed("a chunk is longer than its size says");
        }
        position += 2;
    }
}

/// The position after the trailer lines and the empty line that ends them.
fn skip_trailers(rest: &[u8], mut position: usize) -> Option<usize> {
    loop {
        let length = memchr::memmem::find(&rest[position..], b"\r\n")?;
        position += length + 2;
        if length == 0 {
            return Some(position);
        }
    }
}

/// A reply head with its empty line. `headers` come in the order given.
pub fn head(status: u16, headers: &[(&str, &str)]) -> Vec<u8> {
    let mut text = format!("HTTP/1.1 {status} {}\r\n", reason(status));
    for (name, value) in headers {
        text.push_str(name);
        text.push_str(": ");
        text.push_str(value);
        text.push_str("\r\n");
    }
    text.push_str("\r\n");
    text.into_bytes()
}

/// Appends `data` to `out` as one chunk. Empty data adds nothing, since an empty chunk would end the body.
pub fn push_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if data.is_empty() {
        return;
    }
    out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
    out.extend_from_slice(data);
    out.extend_from_slice(b"\r\n");
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        301 => "Moved Permanently",
        302 => "Found",
        307 => "Temporary Redirect",
        308 => "Permanent Redirect",
        400 => "Bad Request",
        401 => "Unauthorized",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        408 => "Request Timeout",
        413 => "Payload Too Large",
        429 => "Too Many Requests",
        500 => "Internal Server Error",
        502 => "Bad Gateway",
        503 => "Service Unavailable",
        504 => "Gateway Timeout",
        _ => "Status",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: &[u8] =
        b"POST /v1/x?a=1 HTTP/1.1\r\nHost: h\r\nX-Word:  two words \r\nContent-Length: 5\r\n\r\n\x00ab\r\n";
    const CHUNKED: &[u8] = b"PUT /y HTTP/1.1\r\nTransfer-Encoding: Chunked\r\n\r\n3;note=1\r\none\r\nA\r\n-two--two-\r\n0\r\nTrail: er\r\n\r\n";

    /// The requests in `wire` when it arrives in two pieces cut at `cut`.
    fn in_two_pieces(wire: &[u8], cut: usize) -> Vec<Request> {
        let mut buffer = Vec::new();
        let mut found = Vec::new();
        for piece in [&wire[..cut], &wire[cut..]] {
            buffer.extend_from_slice(piece);
            while let Some((request, used)) = parse(&buffer).unwrap() {
                buffer.drain(..used);
                found.push(request);
            }
        }
        assert!(buffer.is_empty(), "cut at {cut}: {} bytes left over", buffer.len());
        found
    }

    #[test]
    fn pipelined_requests_survive_a_split_at_any_byte() {
        let get = b"GET /health HTTP/1.1\r\nConnection: close\r\n\r\n";
        let wire = [PLAIN, CHUNKED, get].concat();
        for cut in 0..=wire.len() {
            let found = in_two_pieces(&wire, cut);
            assert_eq!(found.len(), 3, "cut at {cut}");
            assert_eq!((found[0].method.as_str(), found[0].path.as_str()), ("POST", "/v1/x"));
            assert_eq!(found[0].header("x-word"), Some("two words"));
            assert_eq!(&found[0].body[..], b"\x00ab\r\n");
            assert_eq!(&found[1].body[..], b"one-two--two-");
            assert!(found[1].keep_alive);
            assert!(!found[2].keep_alive);
        }
    }

    #[test]
    fn an_incomplete_request_is_not_taken() {
        for wire in [PLAIN, CHUNKED] {
            for end in 0..wire.len() {
                assert_eq!(parse(&wire[..end]), Ok(None), "first {end} bytes");
            }
        }
    }

    #[test]
    fn what_can_never_be_a_request_is_refused() {
        let wires: [&[u8]; 6] = [
            b"HELLO\r\n\r\n",
            b"GET / HTTP/2.0\r\n\r\n",
            b"GET / HTTP/1.1\r\nno colon\r\n\r\n",
            b"POST / HTTP/1.1\r\nContent-Length: -4\r\n\r\n",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nabc\r\n",
        ];
        for wire in wires {
            assert!(parse(wire).is_err(), "{:?}", String::from_utf8_lossy(wire));
        }
        assert!(parse(&vec![b'a'; HEAD_LIMIT_BYTES + 1]).is_err());
    }

    #[test]
    fn old_clients_close_unless_they_say_otherwise() {
        let keep = |wire: &[u8]| parse(wire).unwrap().unwrap().0.keep_alive;
        assert!(!keep(b"GET / HTTP/1.0\r\n\r\n"));
        assert!(keep(b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n"));
    }

    #[test]
    fn an_empty_chunk_is_never_written() {
        let mut out = Vec::new();
        push_chunk(&mut out, b"");
        push_chunk(&mut out, b"0123456789abcdef!");
        assert_eq!(out, b"11\r\n0123456789abcdef!\r\n");
    }
}
