//! The server as its clients see it, over plain sockets.

use std::{
    io::{ErrorKind, Read, Write},
    net::TcpStream as Socket,
};

use serde_json::{Value, json};

use eaglet_serve::{
    api, http,
    vocabulary::{EOS, decode},
};

use super::*;

/// A keep-alive client that understands just enough.
struct Client {
    socket: Socket,
    unread: Vec<u8>,
}

struct Got {
    status: u16,
    head: String,
    body: Vec<u8>,
}

impl Got {
    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    fn text(&self) -> String {
        String::from_utf8(self.body.clone()).unwrap()
    }

    /// The payloads of the events, without the last `[DONE]`.
    fn events(&self) -> Vec<Value> {
        let text = self.text();
        let mut payloads: Vec<&str> =
            text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap()).collect();
        assert_eq!(payloads.pop(), Some("[DONE]"));
        payloads.into_iter().map(|payload| serde_json::from_str(payload).unwrap()).collect()
    }
}

impl Client {
    fn to(server: &ScriptedServer) -> Self {
        Self { socket: Socket::connect(("127.0.0.1", server.port())).unwrap(), unread: Vec::new() }
    }

    fn write(&mut self, method: &str, path: &str, headers: &str, body: &str) {
        let request =
            format!("{method} {path} HTTP/1.1\r\nhost: x\r\n{headers}content-length: {}\r\n\r\n{body}", body.len());
        self.socket.write_all(request.as_bytes()).unwrap();
    }

    /// Reads more; what the peer's farewell was when there is none.
    fn more(&mut self) -> Result<(), ErrorKind> {
        let mut piece = [0; 4096];
        match self.socket.read(&mut piece) {
            Ok(0) => Err(ErrorKind::UnexpectedEof),
            Ok(count) => {
                self.unread.extend_from_slice(&piece[..count]);
                Ok(())
            }
            Err(error) => Err(error.kind()),
        }
    }

    fn read(&mut self) -> Result<Got, ErrorKind> {
        let head_length = loop {
            match memchr::memmem::find(&self.unread, b"\r\n\r\n") {
                Some(length) => break length + 4,
                None => self.more()?,
            }
        };
        let head = String::from_utf8(self.unread[..head_length].to_vec()).unwrap();
        let status = head[9..12].parse().unwrap();
        if head.contains("transfer-encoding: chunked") {
            // A chunked reply has the form of a chunked request.
            let request = |rest: &[u8]| [b"POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n", rest].concat();
            loop {
                let wire = request(&self.unread[head_length..]);
                if let Some((whole, used)) = http::parse(&wire).unwrap() {
                    self.unread.drain(..head_length + used - request(b"").len());
                    return Ok(Got { status, head, body: whole.body.to_vec() });
                }
                self.more()?;
            }
        }
        let length: usize = header_of(&head, "content-length").unwrap().parse().unwrap();
        while self.unread.len() < head_length + length {
            self.more()?;
        }
        let body = self.unread[head_length..head_length + length].to_vec();
        self.unread.drain(..head_length + length);
        Ok(Got { status, head, body })
    }

    fn get(&mut self, path: &str) -> Got {
        self.write("GET", path, "", "");
        self.read().unwrap()
    }

    fn post(&mut self, path: &str, body: &Value) -> Got {
        self.write("POST", path, "", &body.to_string());
        self.read().unwrap()
    }
}

fn header_of<'h>(head: &'h str, name: &str) -> Option<&'h str> {
    head.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))
}

fn chat(text: &str) -> Value {
    json!({"model": "fake/model", "messages": [{"role": "user", "content": text}], "return_token_ids": true})
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn with(mut body: Value, changes: Value) -> Value {
    for (name, value) in changes.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

fn reasoning_server() -> ScriptedServer {
    ScriptedServer::start(Script::new().answer(Answer { reasoning: Reasoning::Reasoning, ..Answer::default() }))
}

#[test]
fn a_whole_chat_reply_agrees_with_itself() {
    let server = reasoning_server();
    let mut client = Client::to(&server);
    let reply = client.post(api::CHAT, &chat("How do tides work?")).json();
    let choice = &reply["choices"][0];
    let token_ids = ids(&choice["token_ids"]);
    assert_eq!(reply["usage"]["completion_tokens"], token_ids.len());
    assert_eq!(reply["usage"]["prompt_tokens"], ids(&reply["prompt_token_ids"]).len());
    assert_eq!((token_ids.last(), &choice["finish_reason"]), (Some(&EOS), &json!("stop")));
    let text = client.post("/detokenize", &json!({"tokens": token_ids[..token_ids.len() - 1]})).json();
    let message = &choice["message"];
    let [reasoning, content] = ["reasoning", "content"].map(|field| message[field].as_str().unwrap().to_owned());
    assert_eq!(text["prompt"], reasoning + &content);
    let tokens = client.post("/tokenize", &chat("How do tides work?")).json();
    assert_eq!(tokens["tokens"], reply["prompt_token_ids"]);
}

#[test]
fn a_stream_says_what_the_whole_reply_says() {
    for tokens_per_chunk in [1, 7] {
        let answer = Answer { reasoning: Reasoning::ReasoningContent, tokens_per_chunk, ..Answer::default() };
        let server = ScriptedServer::start(Script::new().answer(answer));
        let mut client = Client::to(&server);
        let whole = client.post(api::CHAT, &chat("Name three rivers.")).json();
        let streamed = json!({"stream": true, "stream_options": {"include_usage": true}});
        let events = client.post(api::CHAT, &with(chat("Name three rivers."), streamed)).events();
        assert_eq!(events[0]["prompt_token_ids"], whole["prompt_token_ids"]);
        let last = events.last().unwrap();
        assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &whole["usage"]));
        let (mut reasoning, mut content, mut token_ids) = (String::new(), String::new(), Vec::new());
        for event in &events[1..events.len() - 1] {
            let choice = &event["choices"][0];
            reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
            content += choice["delta"]["content"].as_str().unwrap_or_default();
            token_ids.extend(ids(&choice["token_ids"]));
        }
        let choice = &whole["choices"][0];
        assert_eq!(choice["message"]["reasoning_content"], reasoning);
        assert_eq!(choice["message"]["content"], content);
        assert_eq!(ids(&choice["token_ids"]), token_ids);
        assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
    }
}

#[test]
fn an_interrupted_answer_can_be_continued_by_ids() {
    let server = reasoning_server();
    let mut client = Client::to(&server);
    let whole = client.post(api::CHAT, &chat("Continue me")).json();
    let token_ids = ids(&whole["choices"][0]["token_ids"]);
    let prompt = [ids(&whole["prompt_token_ids"]), token_ids[..9].to_vec()].concat();
    let request = json!({"model": "fake/model", "prompt": prompt, "max_tokens": 4000, "return_token_ids": true});
    let rest = client.post(api::COMPLETIONS, &request).json();
    assert_eq!(ids(&rest["choices"][0]["token_ids"]), token_ids[9..]);
    assert_eq!(ids(&rest["choices"][0]["prompt_token_ids"]), prompt);
    let events = client.post(api::COMPLETIONS, &with(request, json!({"stream": true}))).events();
    let text: String = events.iter().map(|event| event["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(rest["choices"][0]["text"], text);
    let ids = &token_ids[..token_ids.len() - 1];
    assert_eq!(decode(&ids[..9]).trim_end_matches('\u{FFFD}').len() + text.len(), decode(ids).len());
}

#[test]
fn limits_and_several_choices_are_honoured() {
    let server = ScriptedServer::start(Script::new());
    let mut client = Client::to(&server);
    let reply = client.post(api::CHAT, &with(chat("a"), json!({"max_completion_tokens": 3, "n": 2}))).json();
    assert_eq!(reply["usage"]["completion_tokens"], 6);
    for index in 0..2 {
        assert_eq!(reply["choices"][index]["finish_reason"], "length");
        assert_eq!(ids(&reply["choices"][index]["token_ids"]).len(), 3);
    }
    assert_ne!(reply["choices"][0]["token_ids"], reply["choices"][1]["token_ids"]);
    let reply = client.post(api::COMPLETIONS, &json!({"prompt": "once", "max_tokens": 900, "ignore_eos": true})).json();
    assert_eq!(reply["usage"]["completion_tokens"], 900);
    assert_eq!(reply["choices"][0]["token_ids"], Value::Null, "ids only when asked for");
}

#[test]
fn refusals_have_the_shape_of_vllm() {
    let answer = Answer { max_model_len: 100, api_key: Some("k-1".to_owned()), ..Answer::default() };
    let server = ScriptedServer::start(Script::new().answer(answer));
    let mut client = Client::to(&server);
    let long = chat(&"-".repeat(200));
    let cases = [
        (with(chat("a"), json!({"model": "nope"})).to_string(), 404, "NotFoundError", json!("model")),
        (with(chat("a"), json!({"max_tokens": 98})).to_string(), 400, "BadRequestError", json!("max_tokens")),
        (long.to_string(), 400, "BadRequestError", json!("input_tokens")),
        ("{\"model\": ".to_owned(), 400, "Bad Request", json!("body.10")),
        ("{}".to_owned(), 400, "Bad Request", json!("body.messages")),
        (with(chat("a"), json!({"n": 1000})).to_string(), 400, "BadRequestError", json!("n")),
        (
            with(chat("a"), json!({"max_tokens": 5, "min_tokens": 6})).to_string(),
            400,
            "BadRequestError",
            json!("min_tokens"),
        ),
        (json!({"messages": []}).to_string(), 400, "BadRequestError", Value::Null),
    ];
    for (body, status, kind, param) in cases {
        client.write("POST", api::CHAT, "Authorization: Bearer k-1\r\n", &body);
        let got = client.read().unwrap();
        let error = &got.json()["error"];
        assert_eq!((got.status, &error["type"], &error["param"]), (status, &json!(kind), &param), "{body}");
        assert_eq!(error["code"], status);
    }
    assert_eq!(client.post(api::CHAT, &chat("a")).status, 401);
    assert_eq!(client.get("/nowhere").status, 404);
    assert_eq!(client.post("/health", &json!({})).status, 405);
    assert_eq!((client.get("/health").status, client.get("/health").body.len()), (200, 0));
    assert_eq!(server.requests()[0].header("authorization"), Some("Bearer k-1"));
}

#[test]
fn rules_act_in_order_and_the_rest_is_answered() {
    let script = Script {
        other: Some(4242),
        ..Script::new()
            .rule(Rule::on_chat().nth([1]).status(429).header("Retry-After", "2").text("{\"error\": \"busy\"}"))
            .rule(Rule::on_chat().nth([2]).status(307).header("Location", "http://h:{other}/{port}"))
            .rule(Rule::on_chat().contains("events").events(["{\"a\": 1}", "[DONE]"]))
            .rule(Rule::on_chat().contains("split").chunks([&b"da"[..], b"ta: \xc3", b"\xa9\n", b"\n"]))
    };
    let server = ScriptedServer::start(script);
    let mut client = Client::to(&server);
    let busy = client.post(api::CHAT, &chat("x"));
    assert_eq!(
        (busy.status, header_of(&busy.head, "Retry-After"), busy.json()["error"].clone()),
        (429, Some("2"), json!("busy"))
    );
    let moved = client.post(api::CHAT, &chat("x"));
    assert_eq!(header_of(&moved.head, "Location"), Some(format!("http://h:4242/{}", server.port()).as_str()));
    assert_eq!(client.post(api::CHAT, &chat("events")).events(), [json!({"a": 1})]);
    assert_eq!(client.post(api::CHAT, &chat("split")).text(), "data: é\n\n");
    assert_eq!(client.post(api::CHAT, &chat("x")).json()["object"], "chat.completion");
    let seen = server.requests();
    assert_eq!(
        seen.iter().map(|request| (request.nth, request.nth_on_connection)).collect::<Vec<_>>(),
        [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]
    );
    assert_eq!(seen[3].json()["messages"][0]["content"], "split");
}

#[test]
fn replies_can_break_off_in_every_way() {
    let script = Script::new()
        .rule(Rule::on("/cut").text("0123456789").end(End::Cut))
        .rule(Rule::on("/cut-events").events(["one", "two"]).end(End::Cut))
        .rule(Rule::on("/reset").events(["one"]).end(End::Reset))
        .rule(Rule::on("/no-reply").reset_before_reply())
        .rule(Rule::on("/close").text("bye").end(End::Close))
        .rule(Rule::on("/wire").wire([&b"HTTP/1.1 2"[..], b"00 OK\r\ncontent-length: 9\r\n\r\nab"]).end(End::Cut));
    let server = ScriptedServer::start(script);
    let farewell = |path: &str| {
        let mut client = Client::to(&server);
        client.write("GET", path, "", "");
        let read = client.read().map(|got| got.status);
        (read.err().unwrap_or_else(|| client.more().unwrap_err()), String::from_utf8(client.unread).unwrap())
    };
    let (kind, text) = farewell("/cut");
    assert!(
        kind == ErrorKind::UnexpectedEof && text.contains("content-length: 10\r\n") && text.ends_with("\r\n01234"),
        "{text}"
    );
    let (kind, text) = farewell("/cut-events");
    assert!(kind == ErrorKind::UnexpectedEof && text.ends_with("b\r\ndata: two\n\n\r\n"), "{text}");
    assert_eq!(farewell("/reset").0, ErrorKind::ConnectionReset);
    assert_eq!(farewell("/no-reply"), (ErrorKind::ConnectionReset, String::new()));
    assert_eq!(farewell("/close"), (ErrorKind::UnexpectedEof, String::new()), "the reply was whole");
    assert!(farewell("/wire").1.ends_with("200 OK\r\ncontent-length: 9\r\n\r\nab"));
    let seen = server.requests();
    assert_eq!(
        seen.iter().filter(|request| request.answered).map(|request| request.path.as_str()).collect::<Vec<_>>(),
        ["/close"]
    );
}

#[test]
fn a_reused_connection_can_be_killed_or_left_to_die() {
    let server = ScriptedServer::start(Script { kill_reused: true, ..Script::new() });
    let mut client = Client::to(&server);
    assert_eq!(client.get("/health").status, 200);
    client.write("GET", "/health", "", "");
    assert_eq!(client.read().err(), Some(ErrorKind::ConnectionReset));
    assert_eq!(Client::to(&server).get("/health").status, 200);
    let seen: Vec<_> =
        server.requests().iter().map(|request| (request.connection, request.nth, request.answered)).collect();
    assert_eq!(seen, [(1, 1, true), (1, 1, false), (2, 2, true)]);

    let server = ScriptedServer::start(Script { close_idle_ms: Some(1), ..Script::new() });
    let mut client = Client::to(&server);
    assert_eq!(client.get("/health").status, 200);
    assert_eq!(client.more().err(), Some(ErrorKind::UnexpectedEof));
}

#[test]
fn a_hanging_stop_leaves_connections_open_and_silent() {
    let endless = Rule { repeat: Some(-1), ..Rule::on_chat().events(["tick"]) };
    let server = ScriptedServer::start(Script::new().rule(endless));
    let mut busy = Client::to(&server);
    let mut idle = Client::to(&server);
    assert_eq!(idle.get("/health").status, 200);
    busy.write("POST", api::CHAT, "", "{}");
    busy.more().unwrap();
    server.stop_hanging();
    assert_eq!(Socket::connect(("127.0.0.1", server.port())).unwrap_err().kind(), ErrorKind::ConnectionRefused);
    // What was sent before is drained; then there is silence, no end.
    busy.socket.set_nonblocking(true).unwrap();
    while busy.more().is_ok() {}
    assert_eq!(busy.more().err(), Some(ErrorKind::WouldBlock));
    idle.write("GET", "/health", "", "");
    idle.socket.set_nonblocking(true).unwrap();
    assert_eq!(idle.more().err(), Some(ErrorKind::WouldBlock));
    assert_eq!(server.in_flight(), 0, "nothing is generated any more");

    let again = ScriptedServer::start_on(server.port(), Script::new());
    assert_eq!(Client::to(&again).get("/health").status, 200);
    server.stop_resetting();
    assert_eq!(busy.more().err(), Some(ErrorKind::ConnectionReset));
}

#[test]
fn a_resetting_stop_resets_what_is_under_way_and_the_port_can_be_taken_again() {
    let server = ScriptedServer::start(Script::new().rule(Rule::on_chat().end(End::Hang)));
    let port = server.port();
    let mut client = Client::to(&server);
    client.write("POST", api::CHAT, "", "{}");
    while server.requests().is_empty() {
        std::thread::yield_now();
    }
    assert_eq!((server.in_flight(), server.max_in_flight()), (1, 1));
    server.stop_resetting();
    assert_eq!(client.read().err(), Some(ErrorKind::ConnectionReset));
    drop(server);
    let again = ScriptedServer::start_on(port, Script::new());
    assert_eq!(Client::to(&again).get("/version").json()["version"], "0.32.0");
}

/// The value of a metric, whatever its labels.
fn metric(client: &mut Client, name: &str) -> f64 {
    let text = client.get("/metrics").text();
    let line = text.lines().find(|line| line.starts_with(&format!("vllm:{name}{{"))).unwrap();
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[test]
fn metrics_follow_the_traffic() {
    let server = ScriptedServer::start(Script::new());
    let mut client = Client::to(&server);
    let total: u64 = (0..5)
        .map(|number| {
            client.post(api::CHAT, &chat(&number.to_string())).json()["usage"]["completion_tokens"].as_u64().unwrap()
        })
        .sum();
    assert_eq!(metric(&mut client, "generation_tokens_total"), total as f64);
    assert_eq!(metric(&mut client, "num_requests_running"), 0.0);
    assert_eq!(metric(&mut client, "request_success_total"), 5.0);
}

#[test]
fn a_full_batch_queues_and_clients_that_leave_free_their_places() {
    let hour = 3.6e6;
    let script = Script::new().answer(Answer { max_running: 1, first_token_ms: hour, ..Answer::default() });
    let server = ScriptedServer::start(script);
    let mut watcher = Client::to(&server);
    let mut gauges = || (metric(&mut watcher, "num_requests_running"), metric(&mut watcher, "num_requests_waiting"));
    let mut clients: Vec<Client> = (0..3).map(|_| Client::to(&server)).collect();
    for client in &mut clients {
        client.write("POST", api::CHAT, "", &chat("slow").to_string());
    }
    while gauges() != (1.0, 2.0) {}
    clients.truncate(1);
    while gauges() != (1.0, 0.0) && gauges() != (0.0, 0.0) {}
    drop(clients);
    while gauges() != (0.0, 0.0) {}
    assert_eq!((server.in_flight(), server.max_in_flight()), (0, 3));
}

#[test]
fn bench_replies_come_in_turn_and_whole() {
    for event_ms in [0, 1] {
        let bench = Bench { mean_tokens: 12, event_ms, whole_ms: 0 };
        let server = ScriptedServer::start(Script { bench: Some(bench), ..Script::new() });
        let mut client = Client::to(&server);
        let mut lengths = Vec::new();
        for _ in 0..3 {
            let events = client.post(api::CHAT, &with(chat("x"), json!({"stream": true}))).events();
            let token_ids: Vec<u32> = events
                .iter()
                .filter_map(|event| event["choices"][0]["token_ids"].as_array())
                .flatten()
                .map(|id| id.as_u64().unwrap() as u32)
                .collect();
            assert_eq!(events.last().unwrap()["usage"]["completion_tokens"], token_ids.len());
            lengths.push(token_ids.len());
        }
        let whole = client.post(api::CHAT, &chat("x")).json();
        assert_eq!(whole["usage"]["completion_tokens"], ids(&whole["choices"][0]["token_ids"]).len());
        assert!(lengths.iter().any(|length| *length != lengths[0]), "{lengths:?}");
        assert_eq!(client.get("/v1/models").json()["data"][0]["max_model_len"], 8192);
    }
}
