//! Where a server is and how eaglet presents itself there.
//!
//! The URL may be given with or without `/v1` (or with the whole path of the chat API). Credentials inside it are taken out at
//! once; everything that is shown or recorded uses [`Endpoint::label`], which has none.

use super::connection::Connector;
use eaglet_core::redacted::{Scrubber, Secret};
use eaglet_core::{Error, Result};
use hyper::header::{AUTHORIZATION, HOST, HeaderMap, HeaderName, HeaderValue, USER_AGENT};
use std::rc::Rc;
use url::Url;

/// A server to talk to.
#[derive(Debug)]
pub struct Endpoint {
    /// `http` or `https`.
    pub tls: bool,
    /// Host name or address, without brackets.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// Path in front of `/v1`, without a slash at its end; mostly empty.
    base_path: String,
    /// Headers of every request.
    headers: HeaderMap,
    /// Knows the secrets of this endpoint.
    pub scrubber: Scrubber,
    /// What makes connections to it, where that is not TCP.
    pub(super) connector: Option<Rc<dyn Connector>>,
}

/// Header names whose values are secrets.
const SECRET_HEADER_WORDS: [&str; 5] = ["auth", "key", "token", "cookie", "secret"];

impl Endpoint {
    /// Reads `--url`, the key and `--header NAME:VALUE`s.
    ///
    /// # Errors
    /// Usage: not an http(s) URL, or a header that cannot be sent; the message holds no secret.
    pub fn new(url: &str, key: Option<&Secret>, extra_headers: &[String]) -> Result<Self> {
        let parsed = parse_url(url)?;
        let host = parsed.host_str().unwrap_or_default().trim_matches(['[', ']']).to_owned();
        let tls = parsed.scheme() == "https";
        let port = parsed.port_or_known_default().unwrap_or(80);
        let mut endpoint = Endpoint {
            tls,
            host,
            port,
            base_path: base_path(parsed.path()),
            headers: HeaderMap::new(),
            scrubber: Scrubber::default(),
            connector: None,
        };
        endpoint.set_headers(&parsed, key, extra_headers)?;
        Ok(endpoint)
    }

    fn set_headers(&mut self, url: &Url, key: Option<&Secret>, extra: &[String]) -> Result<()> {
        let authority = match url.port() {
            Some(port) => format!("{}:{port}", url.host_str().unwrap_or_default()),
            None => url.host_str().unwrap_or_default().to_owned(),
        };
        let host =
            HeaderValue::from_str(&authority).map_err(|_| Error::usage("the URL's host cannot be sent in a header"))?;
        self.headers.insert(HOST, host);
        self.headers.insert(USER_AGENT, HeaderValue::from_static(concat!("eaglet/", env!("CARGO_PKG_VERSION"))));
        if let Some(password) = url.password().filter(|p| !p.is_empty()) {
            self.scrubber.add(password);
            let basic = base64(format!("{}:{password}", url.username()).as_bytes());
            self.scrubber.add(&basic);
            self.authorize(&format!("Basic {basic}"))?;
        }
        if let Some(key) = key {
            self.scrubber.add(key.reveal());
            self.authorize(&format!("Bearer {}", key.reveal()))?;
        }
        extra.iter().try_for_each(|header| self.add_header(header))
    }

    fn authorize(&mut self, value: &str) -> Result<()> {
        let mut value =
            HeaderValue::from_str(value).map_err(|_| Error::usage("the credentials cannot be sent in a header"))?;
        value.set_sensitive(true);
        self.headers.insert(AUTHORIZATION, value);
        Ok(())
    }

    fn add_header(&mut self, header: &str) -> Result<()> {
        let bad = |what: &str| {
            Error::usage(format!("--header: {what}"))
                .hint("write it as --header 'NAME: VALUE'; the value is not shown here")
        };
        let (name, value) = header.split_once(':').ok_or_else(|| bad("no colon between name and value"))?;
        let name = HeaderName::from_bytes(name.trim().as_bytes()).map_err(|_| bad("the name is not a header name"))?;
        let mut header =
            HeaderValue::from_str(value.trim()).map_err(|_| bad("the value cannot be sent in a header"))?;
        if SECRET_HEADER_WORDS.iter().any(|word| name.as_str().contains(word)) {
            header.set_sensitive(true);
            for word in value.split_whitespace() {
                self.scrubber.add(word);
            }
        }
        self.headers.insert(name, header);
        Ok(())
    }

    /// The same server, reached by other means than TCP and TLS: for simulations.
    #[must_use]
    pub fn reached_by(self, connector: Rc<dyn Connector>) -> Self {
        Endpoint { connector: Some(connector), ..self }
    }

    /// Headers of every request.
    pub fn headers(&self) -> &HeaderMap {
        &self.headers
    }

    /// The path of an API call, e.g. `path("/v1/models")`.
    pub fn path(&self, path: &str) -> String {
        format!("{}{path}", self.base_path)
    }

    /// The server without credentials: what is shown and recorded.
    pub fn label(&self) -> String {
        let scheme = if self.tls { "https" } else { "http" };
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        format!("{scheme}://{host}:{}{}", self.port, self.base_path)
    }
}

fn parse_url(url: &str) -> Result<Url> {
    let hint = "give it as http://HOST:PORT, with or without /v1";
    let with_scheme = if url.contains("://") { url.to_owned() } else { format!("http://{url}") };
    // The text of a URL that does not parse may hold a password, so only what can be shown is shown.
    let shown = if url.contains('@') { "the server URL".to_owned() } else { format!("the server URL {url:?}") };
    let parsed = Url::parse(with_scheme.trim()).map_err(|e| Error::usage(format!("{shown}: {e}")).hint(hint))?;
    if !matches!(parsed.scheme(), "http" | "https") {
        return Err(Error::usage(format!("{shown}: expected http or https, got {}", parsed.scheme())).hint(hint));
    }
    if parsed.host_str().is_none_or(str::is_empty) {
        return Err(Error::usage(format!("{shown}: no host")).hint(hint));
    }
    Ok(parsed)
}

/// What stands in front of `/v1`.
fn base_path(path: &str) -> String {
    let path = path.trim_end_matches('/');
    let path = path.strip_suffix("/chat/completions").unwrap_or(path);
    let path = path.strip_suffix("/v1").unwrap_or(path);
    path.trim_end_matches('/').to_owned()
}

/// Standard base64 with padding: only for the one `Basic` header.
fn base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().enumerate().fold(0u32, |word, (i, byte)| word | u32::from(*byte) << (16 - 8 * i));
        for place in 0..4 {
            let digit = ALPHABET[(word >> (18 - 6 * place) & 63) as usize];
            text.push(if place <= chunk.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(url: &str) -> Endpoint {
        Endpoint::new(url, None, &[]).unwrap()
    }

    #[test]
    fn the_url_may_have_v1_or_not() {
        for url in [
            "http://h:8000",
            "http://h:8000/",
            "http://h:8000/v1",
            "http://h:8000/v1/",
            "h:8000",
            "http://h:8000/v1/chat/completions",
        ] {
            let endpoint = endpoint(url);
            assert_eq!(endpoint.path("/v1/models"), "/v1/models", "{url}");
            assert_eq!(endpoint.label(), "http://h:8000", "{url}");
        }
        assert_eq!(endpoint("https://h/gw/v1").path("/health"), "/gw/health");
        assert_eq!(endpoint("https://h/gw/v1").port, 443);
        assert_eq!(endpoint("http://[::1]:9").label(), "http://[::1]:9");
    }

    #[test]
    fn credentials_in_the_url_are_sent_and_never_shown() {
        let endpoint = endpoint("http://me:s3cret-word@h:1/v1");
        let shown = format!("{endpoint:?} {}", endpoint.label());
        assert!(!shown.contains("s3cret-word") && !shown.contains("me"), "{shown}");
        assert_eq!(endpoint.headers()[AUTHORIZATION], "Basic bWU6czNjcmV0LXdvcmQ=");
        assert_eq!(endpoint.scrubber.scrub("no: s3cret-word bWU6czNjcmV0LXdvcmQ="), "no: *** ***");
    }

    #[test]
    fn errors_do_not_hold_what_may_be_a_secret() {
        for (url, header) in [
            ("ftp://u:hunter22@h", None),
            ("http://h", Some("Authorization Bearer hunter22")),
            ("http://h", Some("a: hunter22\nb: c")),
        ] {
            let headers: Vec<String> = header.map(str::to_owned).into_iter().collect();
            let error = Endpoint::new(url, None, &headers).unwrap_err();
            assert!(!format!("{error:?}").contains("hunter22"), "{error:?}");
        }
    }

    #[test]
    fn base64_pads_as_the_rfc_says() {
        let cases = [("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foob", "Zm9vYg==")];
        assert!(cases.iter().all(|(plain, coded)| base64(plain.as_bytes()) == *coded));
    }
}
