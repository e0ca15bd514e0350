package cli

import (
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
	"github.com/dunlin-project/dunlin/controlplane"
	"github.com/dunlin-project/dunlin/pki"
)

func (a *app) tokenCmd() *cobra.Command {
	c := &cobra.Command{
		Use: "token", Short: "Make join lines for new nodes and servers", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	var ttl time.Duration
	var uses int
	var server bool
	var node string
	create := &cobra.Command{
		Use:   "create",
		Short: "Print one line that lets a new node, or server, join",
		Long: `Print one line that lets a new node join: on it, run 'dunlin agent --join LINE'.
With --server the line is for a further server: 'dunlin server --join LINE'. It
gets the keys of the cluster: treat such a line like the administrator's
kubeconfig.

The line pins this cluster's certificate authority, works once and expires.
With --node-name the node is called so, whatever its own name is.`,
		Example: `  dunlin token create
  dunlin token create --node-name shop-12
  dunlin token create --server --ttl 10m`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if ttl <= 0 || uses <= 0 {
				return usagef("--ttl and --uses must be positive")
			}
			cl, err := a.client()
			if err != nil {
				return err
			}
			body, err := json.Marshal(controlplane.TokenRequest{TTLSeconds: int64(ttl.Seconds()), Uses: uses, Server: server, NodeName: node})
			if err != nil {
				return fmt.Errorf("make request: %w", err)
			}
			var reply controlplane.TokenReply
			r := client.Request{Method: http.MethodPost, Path: controlplane.TokensPath, ContentType: client.JSON, Body: body}
			if err := cl.JSON(cmd.Context(), r, &reply); err != nil {
				return err
			}
			a.printf("%s\n", reply.Line)
			if jl, err := pki.ParseJoinLine(reply.Line); err == nil && onlyLoopback(jl.Servers) {
				a.notef("Warning: this server tells nodes the address %s, which other machines cannot reach; start it with --listen and --advertise.\n", strings.Join(jl.Servers, ", "))
			}
			return nil
		},
	}
	create.Flags().DurationVar(&ttl, "ttl", time.Hour, "how long the line works")
	create.Flags().IntVar(&uses, "uses", 1, "how many nodes may join with it")
	create.Flags().BoolVar(&server, "server", false, "the line is for a server, not for a node")
	create.Flags().StringVar(&node, "node-name", "", "what the node will be called (default: what it calls itself)")
	c.AddCommand(create)
	return c
}

func (a *app) kubeconfigCmd() *cobra.Command {
	var path bool
	c := &cobra.Command{
		Use:   "kubeconfig",
		Short: "Print the administrator's kubeconfig, for kubectl, Helm and others",
		Example: `  export KUBECONFIG=$(dunlin kubeconfig --path)
  dunlin kubeconfig > ~/.kube/config
  dunlin kubeconfig --config-dir /srv/dunlin`,
		Args: cobra.NoArgs,
		RunE: func(*cobra.Command, []string) error { return a.printKubeconfig(path) },
	}
	c.Flags().BoolVar(&path, "path", false, "print where the file is")
	return c
}

// onlyLoopback says whether none of the addresses leaves this machine.
func onlyLoopback(servers []string) bool {
	for _, s := range servers {
		host, _, err := net.SplitHostPort(s)
		if err != nil {
			return false
		}
		ip, err := netip.ParseAddr(host)
		if (err != nil && host != "localhost") || (err == nil && !ip.IsLoopback()) {
			return false
		}
	}
	return len(servers) > 0
}
