package cli

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/dunlin-project/dunlin/cli/client"
)

// completeWait bounds what pressing the tab key may take.
const completeWait = 2 * time.Second

// completeObjects completes "TYPE NAME..." and "TYPE/NAME...".
func (a *app) completeObjects(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	return a.complete(cmd.Context(), func(ctx context.Context, c *client.Client, all []client.Resource) ([]string, cobra.ShellCompDirective) {
		if typ, _, ok := strings.Cut(typed, "/"); ok {
			return objectNames(ctx, c, all, typ, typ+"/"), cobra.ShellCompDirectiveNoFileComp
		}
		if len(args) == 0 {
			return typeNames(all), cobra.ShellCompDirectiveNoFileComp
		}
		if strings.Contains(args[0], "/") {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return left(objectNames(ctx, c, all, args[0], ""), args[1:]), cobra.ShellCompDirectiveNoFileComp
	})
}

func (a *app) completePods(cmd *cobra.Command, args []string, typed string) ([]string, cobra.ShellCompDirective) {
	if strings.Contains(typed, "/") {
		return a.completeObjects(cmd, args, typed)
	}
	return a.completeType(cmd, args, "pods", "")
}

func (a *app) completeDeployments(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	return a.completeType(cmd, args, "deployments", "deploy/")
}

func (a *app) completeType(cmd *cobra.Command, args []string, typ, prefix string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return a.complete(cmd.Context(), func(ctx context.Context, c *client.Client, all []client.Resource) ([]string, cobra.ShellCompDirective) {
		return objectNames(ctx, c, all, typ, prefix), cobra.ShellCompDirectiveNoFileComp
	})
}

// complete asks the server; without one there is nothing to offer.
func (a *app) complete(ctx context.Context, f func(context.Context, *client.Client, []client.Resource) ([]string, cobra.ShellCompDirective)) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(ctx, completeWait)
	defer cancel()
	c, err := a.client()
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	c.Warn = func(string) {}
	all, err := c.Resources(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	return f(ctx, c, all)
}

// typeNames are the plural names that can be listed.
func typeNames(all []client.Resource) []string {
	var out []string
	for _, r := range all {
		if slices.Contains(r.Verbs, "list") {
			out = append(out, r.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func objectNames(ctx context.Context, c *client.Client, all []client.Resource, typ, prefix string) []string {
	rs, err := client.Find(all, typ)
	if err != nil {
		return nil
	}
	var out []string
	for _, r := range rs {
		names, err := namesOf(ctx, c, r, "")
		if err != nil {
			continue
		}
		for _, n := range names {
			out = append(out, prefix+n)
		}
	}
	return out
}

// left are the names that are not on the command line yet.
func left(names, typed []string) []string {
	return slices.DeleteFunc(names, func(n string) bool { return slices.Contains(typed, n) })
}
