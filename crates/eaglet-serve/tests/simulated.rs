//! A simulated server as its clients see it: shapes as vLLM 0.32 has them, pace, queue, continuation. On a stopped clock.

#![allow(clippy::unwrap_used)]

mod common;

use common::{CHAT, COMPLETIONS, Client, chat, ids, metric, profile, seconds, start, streamed, with};
use eaglet_serve::simulate::profile::Answers;
use eaglet_serve::simulate::{Profile, Settings, Simulator};
use eaglet_serve::vocabulary::{EOS, THINK_CLOSE};
use serde_json::{Value, json};
use tokio::time::Instant;

fn plain() -> Simulator {
    start(Settings::new(profile()))
}

#[tokio::test(start_paused = true)]
async fn a_whole_chat_reply_has_vllms_fields_and_agrees_with_itself() {
    let server = plain();
    let mut client = Client::to(&server);
    let reply = client.post(CHAT, &chat("How do tides work?")).await.json();
    let choice = &reply["choices"][0];
    let token_ids = ids(&choice["token_ids"]);
    assert_eq!(reply["usage"]["completion_tokens"], token_ids.len());
    assert_eq!(reply["usage"]["prompt_tokens"], ids(&reply["prompt_token_ids"]).len());
    assert_eq!((token_ids.last(), &choice["finish_reason"]), (Some(&EOS), &json!("stop")));
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(
        keys(&choice["message"]),
        ["role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"]
    );
    assert_eq!(
        keys(choice),
        ["index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids", "routed_experts"]
    );
    let close = token_ids.iter().position(|&id| id == THINK_CLOSE).unwrap();
    for (part, field) in [(&token_ids[..close], "reasoning"), (&token_ids[close + 1..token_ids.len() - 1], "content")] {
        let text = client.post("/detokenize", &json!({"tokens": part})).await.json();
        assert_eq!(text["prompt"], choice["message"][field], "{field}");
    }
    let tokens = client.post("/tokenize", &chat("How do tides work?")).await.json();
    assert_eq!((&tokens["tokens"], &tokens["max_model_len"]), (&reply["prompt_token_ids"], &json!(400)));
}

#[tokio::test(start_paused = true)]
async fn a_stream_says_what_the_whole_reply_says_and_repeats_agree() {
    let server = plain();
    let mut client = Client::to(&server);
    let whole = client.post(CHAT, &chat("Name three rivers.")).await.json();
    let got = client.post(CHAT, &streamed(chat("Name three rivers."))).await;
    let events = got.events();
    assert_eq!(events[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    assert_eq!(events[0]["prompt_token_ids"], whole["prompt_token_ids"]);
    assert_eq!(events.last().unwrap()["usage"], whole["usage"]);
    assert_eq!(got.streamed_ids(), ids(&whole["choices"][0]["token_ids"]));
    assert_eq!(events.len(), 1 + 20 + 1, "one event for each step");
    let text = |field: &str| -> String {
        events.iter().filter_map(|event| event["choices"].get(0)?["delta"][field].as_str()).collect()
    };
    let message = &whole["choices"][0]["message"];
    assert_eq!(
        (json!(text("reasoning")), json!(text("content"))),
        (message["reasoning"].clone(), message["content"].clone())
    );
    let other = client.post(CHAT, &with(chat("Name three rivers."), json!({"seed": 5}))).await.json();
    assert_ne!(other["choices"][0]["token_ids"], whole["choices"][0]["token_ids"], "another seed, another answer");
}

#[tokio::test(start_paused = true)]
async fn an_answer_cut_anywhere_is_continued_exactly_from_its_ids() {
    let server = plain();
    let mut client = Client::to(&server);
    let whole = client.post(CHAT, &chat("Continue me")).await.json();
    let (prompt, answer) = (ids(&whole["prompt_token_ids"]), ids(&whole["choices"][0]["token_ids"]));
    for cut in 0..answer.len() {
        let begun = [&prompt[..], &answer[..cut]].concat();
        let request = json!({"model": "test/model", "prompt": begun, "max_tokens": 100, "return_token_ids": true});
        let rest = client.post(COMPLETIONS, &request).await.json();
        assert_eq!(ids(&rest["choices"][0]["token_ids"]), answer[cut..], "cut after {cut}");
        assert_eq!(rest["choices"][0]["finish_reason"], "stop");
        let stream = client.post(COMPLETIONS, &streamed(request)).await;
        assert_eq!(stream.streamed_ids(), answer[cut..], "cut after {cut}, streamed");
    }
    // Cut by its own limit, then continued.
    let short = client.post(CHAT, &with(chat("Continue me"), json!({"max_tokens": 7}))).await.json();
    assert_eq!(
        (ids(&short["choices"][0]["token_ids"]), &short["choices"][0]["finish_reason"]),
        (answer[..7].to_vec(), &json!("length"))
    );
    assert_eq!(short["choices"][0]["message"]["content"], Value::Null, "cut inside the reasoning");
}

#[tokio::test(start_paused = true)]
async fn tokens_come_at_the_pace_of_the_steps_scaled_by_the_speed() {
    for speed in [1.0, 10.0] {
        let server = start(Settings { speed, ..Settings::new(profile()) });
        let begin = Instant::now();
        Client::to(&server).post(CHAT, &streamed(chat("How long?"))).await;
        let took = begin.elapsed().as_secs_f64() * speed;
        // 20 steps of 100 ms; the clock's tick is 1 ms, and no tick adds to another.
        assert!((2.0..2.0 + 0.002 * speed).contains(&took), "{took} at speed {speed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_batch_queues_and_clients_that_leave_free_their_places() {
    let server = plain();
    let mut clients: Vec<Client> = (0..6).map(|_| Client::to(&server)).collect();
    for client in &mut clients {
        client.write("POST", CHAT, &streamed(chat("slow")).to_string()).await;
    }
    tokio::time::sleep(seconds(0.25)).await;
    assert_eq!(metric(&server, "vllm:num_requests_running").await, Some(4.0));
    assert_eq!(metric(&server, "vllm:num_requests_waiting").await, Some(2.0));
    assert!(metric(&server, "vllm:kv_cache_usage_perc").await.is_some_and(|used| used > 0.0 && used < 1.0));
    drop(clients);
    tokio::time::sleep(seconds(0.3)).await;
    assert_eq!(metric(&server, "vllm:num_requests_running").await, Some(0.0));
    assert_eq!(metric(&server, "vllm:num_requests_waiting").await, Some(0.0));
    assert_eq!(metric(&server, "vllm:kv_cache_usage_perc").await, Some(0.0));
}

#[tokio::test(start_paused = true)]
async fn counters_follow_the_traffic() {
    let server = plain();
    let mut client = Client::to(&server);
    let mut total = 0;
    for number in 0..5 {
        let reply = client.post(CHAT, &chat(&number.to_string())).await.json();
        total += reply["usage"]["completion_tokens"].as_u64().unwrap();
    }
    assert_eq!(metric(&server, "vllm:generation_tokens_total").await, Some(total as f64));
    assert_eq!(metric(&server, "vllm:request_success_total").await, Some(5.0));
}

#[tokio::test(start_paused = true)]
async fn a_queue_with_a_bound_refuses_what_is_beyond_it() {
    let profile = Profile { max_num_seqs: 1, max_queued: Some(1), ..profile() };
    let server = start(Settings::new(profile));
    let mut clients: Vec<Client> = (0..3).map(|_| Client::to(&server)).collect();
    for client in &mut clients {
        client.write("POST", CHAT, &chat("x").to_string()).await;
        tokio::time::sleep(seconds(0.05)).await;
    }
    let refused = clients[2].read().await.unwrap();
    assert_eq!((refused.status, &refused.json()["error"]["code"]), (503, &json!(503)));
    for client in &mut clients[..2] {
        assert_eq!(client.read().await.unwrap().status, 200);
    }
}

#[tokio::test(start_paused = true)]
async fn refusals_have_the_shape_of_vllm() {
    let server = plain();
    let mut client = Client::to(&server);
    let cases = [
        (with(chat("a"), json!({"model": "nope"})).to_string(), 404, "NotFoundError", json!("model")),
        (with(chat("a"), json!({"max_tokens": 399})).to_string(), 400, "BadRequestError", json!("max_tokens")),
        (chat(&"-".repeat(500)).to_string(), 400, "BadRequestError", json!("input_tokens")),
        ("{\"model\": ".to_owned(), 400, "Bad Request", json!("body.10")),
        ("{}".to_owned(), 400, "Bad Request", json!("body.messages")),
        (json!({"messages": []}).to_string(), 400, "BadRequestError", Value::Null),
    ];
    for (body, status, kind, param) in cases {
        client.write("POST", CHAT, &body).await;
        let got = client.read().await.unwrap();
        let error = &got.json()["error"];
        assert_eq!((got.status, &error["type"], &error["param"]), (status, &json!(kind), &param), "{body}");
    }
    assert_eq!(client.get("/nowhere").await.json(), json!({"detail": "Not Found"}));
    assert_eq!(client.post("/health", &json!({})).await.status, 405);
    assert_eq!((client.get("/health").await.status, client.get("/health").await.body.len()), (200, 0));
    assert_eq!(client.get("/version").await.json(), json!({"version": "0.32.0"}));
    let model = &client.get("/v1/models").await.json()["data"][0];
    assert_eq!(
        (&model["id"], &model["max_model_len"], &model["owned_by"]),
        (&json!("test/model"), &json!(400), &json!("vllm"))
    );
}

#[tokio::test(start_paused = true)]
async fn several_choices_are_one_sequence_each() {
    let server = plain();
    let mut client = Client::to(&server);
    let reply = client.post(CHAT, &with(chat("a"), json!({"n": 2}))).await.json();
    assert_eq!(reply["usage"]["completion_tokens"], 40);
    assert_ne!(reply["choices"][0]["token_ids"], reply["choices"][1]["token_ids"]);
    let got = client.post(CHAT, &streamed(with(chat("a"), json!({"n": 2})))).await;
    for index in 0..2 {
        let of_choice = |event: &Value| {
            event["choices"].get(0).filter(|choice| choice["index"] == index)?.get("token_ids").map(ids)
        };
        let token_ids: Vec<u32> = got.events().iter().filter_map(of_choice).flatten().collect();
        assert_eq!(token_ids, ids(&reply["choices"][index]["token_ids"]));
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_that_runs_out_costs_time_and_no_token() {
    // Four sequences want more blocks than there are.
    let answers = Answers { mean_tokens: 90.0, ..profile().answers };
    let server = start(Settings::new(Profile { kv_blocks: 25, answers, ..profile() }));
    let alone = Client::to(&server).post(CHAT, &streamed(chat("prompt 0"))).await.streamed_ids();
    let mut clients: Vec<Client> = (0..6).map(|_| Client::to(&server)).collect();
    for (number, client) in clients.iter_mut().enumerate() {
        let text = format!("prompt {number}");
        client.write("POST", CHAT, &streamed(chat(&text)).to_string()).await;
    }
    let mut answers = Vec::new();
    for client in &mut clients {
        answers.push(client.read().await.unwrap().streamed_ids());
    }
    assert!(metric(&server, "vllm:num_preemptions_total").await.is_some_and(|count| count > 0.0));
    assert_eq!(answers[0], alone);
    assert!(answers.iter().all(|answer| answer.last() == Some(&EOS)));
}
