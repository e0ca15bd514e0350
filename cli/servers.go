package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
)

func (a *app) serverListCmd() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "list",
		Short: "Show the servers: who leads, who votes, and why one does not",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return usagef("-o %s: only json is known here", output)
			}
			cl, err := a.client()
			if err != nil {
				return err
			}
			var list controlplane.ServerList
			if err := cl.JSON(cmd.Context(), client.Request{Method: http.MethodGet, Path: controlplane.ServersPath}, &list); err != nil {
				return err
			}
			if output == "json" {
				b, err := json.MarshalIndent(list, "", "  ")
				if err != nil {
					return fmt.Errorf("encode: %w", err)
				}
				a.printf("%s\n", b)
				return nil
			}
			return a.printServers(list)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "json, or a table")
	return c
}

func (a *app) printServers(list controlplane.ServerList) error {
	if list.Unverified {
		a.notef("Warning: no server leads; this is what the server that was asked knows.\n")
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	least := ^uint32(0)
	_, _ = fmt.Fprintln(w, "NAME\tROLE\tREADY\tADDRESSES\tVERSION\tLEVEL\tREASON")
	for _, s := range list.Items {
		ready := "False"
		if s.Ready {
			ready = "True"
		}
		level := "?" // it does not answer
		if s.FeatureLevel > 0 {
			level = strconv.FormatUint(uint64(s.FeatureLevel), 10)
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\n", s.Name, s.Role, ready, strings.Join(s.Addresses, ","), s.Version, level, s.Reason)
		least = min(least, s.FeatureLevel)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if list.FeatureLevel == 0 {
		a.notef("Warning: the server that was asked has just started, and has not read names, addresses and level yet.\n")
		return nil
	}
	if len(list.Items) > 0 && least > list.FeatureLevel {
		a.notef("The cluster's feature level is %d, and every server understands %d: 'dunlin server raise-level' raises it, for good.\n", list.FeatureLevel, least)
	}
	return nil
}

// removeWait is how long a removal waits for another server to lead first.
const removeWait = 30 * time.Second

func (a *app) serverRemoveCmd() *cobra.Command {
	return &cobra.Command{
		Use:   "remove NAME",
		Short: "Take a server out of the cluster for good",
		Long: `Take a server out of the cluster for good.

It may be running or dead. A running one stops with a line that says so; its
state must be removed before it can join again. Where an even number of voters
is left, one of them keeps a copy without a vote. The last voter cannot be
removed. When most voters are lost, no removal can be agreed on: see 'dunlin
server recover'.`,
		Example: `  dunlin server remove pi-3`,
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			name, err := removeServer(cmd.Context(), cl, args[0], removeWait, func() {
				a.notef("waiting up to %v for a server that leads\n", removeWait)
			})
			if err != nil {
				return err
			}
			a.notef("server %s removed\n", name)
			return nil
		},
	}
}

// removeServer waits for a server that leads, and says once that it does.
func removeServer(ctx context.Context, cl *client.Client, name string, wait time.Duration, waiting func()) (string, error) {
	body, err := json.Marshal(controlplane.RemoveServerRequest{Server: name})
	if err != nil {
		return "", fmt.Errorf("make request: %w", err)
	}
	limited, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	r := client.Request{Method: http.MethodPost, Path: controlplane.RemoveServerPath, ContentType: client.JSON, Body: body}
	var last error
	for {
		var reply controlplane.RemoveServerReply
		err := cl.JSON(limited, r, &reply)
		var st *client.StatusError
		switch {
		case errors.As(err, &st) && st.Status.Code == http.StatusServiceUnavailable:
			if last == nil {
				waiting()
			}
			last = err
		case err == nil || ctx.Err() != nil || limited.Err() == nil:
			return reply.Server, err
		case last == nil:
			last = err // no answer at all
		}
		t := time.NewTimer(time.Second) // it was the leader: another one takes over first
		select {
		case <-t.C:
		case <-limited.Done():
			t.Stop()
			if ctx.Err() != nil {
				return "", last
			}
			return "", fmt.Errorf("not removed within %v: %w. Start servers that are down; if most of those that vote are lost for good, stop one that is left and run 'dunlin server recover' on it (see its --help)", wait, last)
		}
	}
}
