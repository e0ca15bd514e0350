// Command outbound-http is a guest that calls an HTTP API, again and again, and prints the answers.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"time"

	dunlin "github.com/dunlin-project/dunlin/sdk/go"
)

func main() {
	url := os.Getenv("URL")
	if url == "" {
		fmt.Fprintln(os.Stderr, "URL is not set")
		os.Exit(2)
	}
	every, err := time.ParseDuration(os.Getenv("EVERY"))
	if err != nil {
		every = 10 * time.Second
	}
	client := &http.Client{Transport: dunlin.Transport(), Timeout: 10 * time.Second}
	for {
		if err := ask(client, url); err != nil {
			fmt.Println("failed:", err)
		}
		if every <= 0 {
			return
		}
		time.Sleep(every)
	}
}

func ask(client *http.Client, url string) error {
	r, err := client.Get(url)
	if err != nil {
		return err
	}
	defer func() { _ = r.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(r.Body, 64<<10))
	if err != nil {
		return err
	}
	fmt.Printf("%s: %s\n", r.Status, b)
	return nil
}
