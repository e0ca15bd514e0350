package cli

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/controlplane/nodeapi"
	"github.com/dunlin-project/dunlin/gossip"
)

func (a *app) netCmd() *cobra.Command {
	c := &cobra.Command{Use: "net", Short: "The network between servers and nodes"}
	c.AddCommand(a.netCheckCmd(), a.netRotateCmd())
	return c
}

// errBlocked ends the check with exit code 1; what is blocked was printed.
var errBlocked = errors.New("not everything gets through")

func (a *app) netCheckCmd() *cobra.Command {
	var output string
	c := &cobra.Command{
		Use:   "check",
		Short: "Try who reaches whom, by which path and in which direction",
		Long: `Try who reaches whom, by which path and in which direction.

Every server and every connected node tries the members of its site by gossip,
UDP and TCP, each direction by itself, and the port of every server. With
--local this machine's agent alone does, which works while no server can be
reached. What is blocked is named with both ends; the exit code is then 1.`,
		Example: `  dunlin net check
  sudo dunlin net check --local`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if output != "" && output != "json" {
				return usagef("-o %s: only json is known here", output)
			}
			cl, err := a.client()
			if err != nil {
				return err
			}
			var list controlplane.NetCheckReply
			if cl.Local() {
				var r gossip.NetReport
				err = cl.JSON(cmd.Context(), client.Request{Method: http.MethodGet, Path: "/net-check"}, &r)
				list.Reports = []gossip.NetReport{r}
			} else {
				err = cl.JSON(cmd.Context(), client.Request{Method: http.MethodGet, Path: controlplane.NetCheckPath}, &list)
			}
			if err != nil {
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
			return a.printNetCheck(list)
		},
	}
	c.Flags().StringVarP(&output, "output", "o", "", "json, or a table")
	c.Flags().BoolVar(&a.local, "local", false, "let the agent of this machine alone try, without a server")
	c.Flags().StringVar(&a.runDir, "run-dir", defaultDirs().run, "with --local, run-time folder of the agent")
	return c
}

func (a *app) printNetCheck(list controlplane.NetCheckReply) error {
	name := func(addr string) string {
		if n := list.Names[addr]; n != "" {
			return n + " (" + addr + ")"
		}
		return addr
	}
	way := func(out, in bool) string {
		switch {
		case out && in:
			return "ok"
		case out:
			return "blocked in"
		case in:
			return "blocked out"
		}
		return "blocked"
	}
	w := tabwriter.NewWriter(a.out, 0, 4, 3, ' ', 0)
	_, _ = fmt.Fprintln(w, "FROM\tTO\tPATH\tRESULT")
	var blocked []string
	seen := map[string]bool{}
	add := func(s string) {
		if !seen[s] { // both ends say it
			seen[s] = true
			blocked = append(blocked, s)
		}
	}
	for _, r := range list.Reports {
		if r.Error != "" {
			_, _ = fmt.Fprintf(w, "%s\t-\t-\tno report: %s\n", r.From, r.Error)
			add(r.From + " gave no report: " + r.Error)
			continue
		}
		here := r.From
		if r.Address == "" {
			_, _ = fmt.Fprintf(w, "%s\t-\tgossip\tnot running\n", r.From)
		} else {
			here = r.From + " (" + r.Address + ")"
		}
		for _, p := range r.Members {
			if p.Silent() {
				_, _ = fmt.Fprintf(w, "%s\t%s\tgossip\tno answer\n", r.From, name(p.Address))
				add(p.Blocked(here, name(p.Address))[0])
				continue
			}
			_, _ = fmt.Fprintf(w, "%s\t%s\tgossip UDP\t%s\n", r.From, name(p.Address), way(p.UDPOut, p.UDPIn))
			_, _ = fmt.Fprintf(w, "%s\t%s\tgossip TCP\t%s\n", r.From, name(p.Address), way(p.TCPOut, p.TCPIn))
			for _, s := range p.Blocked(here, name(p.Address)) {
				add(s)
			}
		}
		for _, d := range r.Servers {
			result := "ok"
			if d.Error != "" {
				result = d.Error
				add(r.From + " does not reach the server at " + name(d.Address) + ": " + d.Error)
			}
			_, _ = fmt.Fprintf(w, "%s\t%s\tserver TCP\t%s\n", r.From, name(d.Address), result)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	for _, r := range list.Rotations {
		a.notef("%s\n", rotationLine(r, time.Now()))
	}
	if len(blocked) == 0 {
		return nil
	}
	for _, s := range blocked {
		a.notef("%s\n", s)
	}
	return errBlocked
}

// rotationLine says where new gossip keys stand, and who holds them up.
func rotationLine(r nodeapi.Rotation, now time.Time) string {
	what := "members learn the new ones"
	if r.Step > 1 {
		what = "members use the new ones, and understand those before"
	}
	since := ""
	if d := now.Sub(r.Since); !r.Since.IsZero() && d >= 0 {
		since = " for " + d.Round(time.Second).String()
	}
	line := fmt.Sprintf("gossip keys of site %s: step %d of 3%s: %s", r.Site, r.Step, since, what)
	if len(r.Missing) > 0 {
		line += "; not yet: " + strings.Join(r.Missing, ", ")
	}
	return line
}

func (a *app) netRotateCmd() *cobra.Command {
	var req controlplane.RotateKeysRequest
	c := &cobra.Command{
		Use:   "rotate-keys [--site ZONE]",
		Short: "Give the members of a site new gossip keys",
		Long: `Give the members of a site new gossip keys.

Members change over one by one, in three steps, each of which waits a while for
the nodes that are connected; 'dunlin net check' says where that stands and for
whom it waits. The keys before are understood for an hour. A node that was revoked ('dunlin node revoke') does not get the new ones, and
revoking replaces the keys at once by itself.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cl, err := a.client()
			if err != nil {
				return err
			}
			body, err := json.Marshal(req)
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			var reply controlplane.RotateKeysRequest
			r := client.Request{Method: http.MethodPost, Path: controlplane.RotateKeysPath, ContentType: client.JSON, Body: body}
			if err := cl.JSON(cmd.Context(), r, &reply); err != nil {
				return err
			}
			a.notef("site %s gets new gossip keys; 'dunlin net check' says who has them\n", reply.Site)
			return nil
		},
	}
	c.Flags().StringVar(&req.Site, "site", "", "the site: the zone of its nodes (default: that of the servers)")
	return c
}
